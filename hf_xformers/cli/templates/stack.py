"""All layers in order, several times."""

from hf_xformers.extend import Stack, StackSpec, bounded, register


class RepeatedStack(Stack):
    """x <- layer_L(... layer_1(x)), `rounds` times with the same layers."""

    def __init__(self, spec):
        super().__init__()
        self.rounds = spec.rounds

    def forward(self, run):
        order = list(run.layers) * self.rounds
        run.begin(steps=len(order))  # what layers share is made once per call
        for step, layer in enumerate(order):  # every step has a cache slot of its own
            run.step(step, layer)
        return run.output()


@register("stack", "repeated")
class RepeatedSpec(StackSpec):
    """rounds: how often the layers run."""

    summary = "all layers in order, several times"
    supports = frozenset({"packed_rows"})

    rounds: int = bounded(2, least=1)

    def num_steps(self, config) -> int:
        return self.rounds * config.num_hidden_layers

    def build(self, config, **where) -> RepeatedStack:
        return RepeatedStack(self)
