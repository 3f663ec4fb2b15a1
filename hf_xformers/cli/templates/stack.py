"""All layers in order, several times."""

from hf_xformers.extend import (
    Stack,
    StackOutput,
    StackSpec,
    add_losses,
    bounded,
    memory_by_step,
    register,
    unpack_layer,
)


class RepeatedStack(Stack):
    """x <- layer_L(... layer_1(x)), `rounds` times with the same layers."""

    def __init__(self, spec):
        super().__init__()
        self.rounds = spec.rounds

    def forward(self, layers, hidden_states, context, *, position, memory=None, past_key_values=None):
        for layer in layers:  # what layers share is made once per call
            layer.prepare(context, past_key_values)
        order = list(layers) * self.rounds
        memories, streams, losses = memory_by_step(memory, len(order)), context.streams, {}
        for step, layer in enumerate(order):  # every run has a cache slot of its own
            hidden_states = position.embed_layer(hidden_states, context.positions, step)
            output = layer(
                hidden_states, memories[step], *streams.values(), context=context, step=step,
                stream_names=tuple(streams), past_key_values=past_key_values,
            )
            hidden_states, streams, new_losses = unpack_layer(output)
            add_losses(losses, new_losses)
        return StackOutput(hidden_states, context, losses)


@register("stack", "repeated")
class RepeatedSpec(StackSpec):
    """rounds: how often the layers run."""

    summary = "all layers in order, several times"
    packed = True

    rounds: int = bounded(2, least=1)

    def num_steps(self, config) -> int:
        return self.rounds * config.num_hidden_layers

    def build(self, config, **where) -> RepeatedStack:
        return RepeatedStack(self)
