# Written by scripts/make_stubs.py.
from .architecture_search import Searching as Searching
from .architecture_search import search as search
from .attention_transfer import AttentionTransferTrainer as AttentionTransferTrainer
from .building import build_config as build_config
from .building import build_model as build_model
from .callbacks import EpochCallback as EpochCallback
from .callbacks import ExactSaves as ExactSaves
from .checkpoints import checkpoint_to_resume as checkpoint_to_resume
from .checkpoints import newest_complete as newest_complete
from .distillation import Distillation as Distillation
from .distillation import DistillationTrainer as DistillationTrainer
from .evaluation import summarise as summarise
from .evaluation import token_statistics as token_statistics
from .linearizing import Linearizing as Linearizing
from .linearizing import linearize as linearize
from .preparation import ModelChoice as ModelChoice
from .preparation import Preparation as Preparation
from .presets import SIZES as SIZES
from .presets import training_defaults as training_defaults
from .pretraining import pretrain as pretrain
from .segments import SegmentCarrier as SegmentCarrier
from .segments import StreamSampler as StreamSampler
from .text import TextData as TextData
from .trainer import XFormerTrainer as XFormerTrainer
from .uptraining import Uptraining as Uptraining
from .uptraining import uptrain as uptrain

__all__ = [
    "AttentionTransferTrainer",
    "Distillation",
    "DistillationTrainer",
    "EpochCallback",
    "ExactSaves",
    "Linearizing",
    "ModelChoice",
    "Preparation",
    "SIZES",
    "Searching",
    "SegmentCarrier",
    "StreamSampler",
    "TextData",
    "Uptraining",
    "XFormerTrainer",
    "build_config",
    "build_model",
    "checkpoint_to_resume",
    "linearize",
    "newest_complete",
    "pretrain",
    "search",
    "summarise",
    "token_statistics",
    "training_defaults",
    "uptrain",
]
