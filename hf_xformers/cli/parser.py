"""The parser of the commands without Trainer flags."""

from __future__ import annotations

import argparse


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser that raises ValueError where argparse would print its usage and exit."""

    def error(self, message: str):
        raise ValueError(f"{message} (see `{self.prog} --help`)")
