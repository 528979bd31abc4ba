"""One window through a model: what it adds to the sums of every projection's moments."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gccompress import halves
from gccompress.errors import GccompressError, NumericalError
from gccompress.roles import SAME_INPUT, Role
from gccompress.view import ModelView


@dataclass(frozen=True)
class Fisher:
    """How the output moments A are estimated.

    Attributes:
        data: use the gradient of the text's own next tokens (empirical Fisher).
        draws: how many times next tokens are sampled from the model as well (true Fisher).
    """

    data: bool = True
    draws: int = 1

    def __str__(self) -> str:
        """Return the form that a plan records, such as `data+1`."""
        return f"{'data' if self.data else 'model'}+{self.draws}"

    @classmethod
    def parse(cls, text: str) -> "Fisher":
        """Return the inverse of `str`. Raises `GccompressError`."""
        source, _, draws = text.partition("+")
        none = source == "model" and draws == "0"
        if source not in ("data", "model") or not draws.isdecimal() or none:
            raise GccompressError(f"Fisher estimate {text!r}; wanted such as data+1 or model+4")
        return cls(source == "data", int(draws))


def input_key(role: Role) -> str:
    """Return the name under which roles that read the same input share one moment."""
    return next(group[0].value for group in SAME_INPUT if role in group)


def moment_widths(view: ModelView, layer: int) -> dict[str, int]:
    """Return the width of every moment of a layer, by its name in the layer's file."""
    inputs = {f"g.{input_key(role)}": view.shape(role, layer)[1] for role in view.roles}
    return inputs | {f"a.{role.value}": view.shape(role, layer)[0] for role in view.roles}


def add_gradients(model: Any, ids: Tensor, fisher: Fisher, seed: int, index: int) -> None:
    """Run one window `[1, seqlen]` forward once, and backward once per set of labels.

    The gradient of the summed NLL at the logits is `softmax - onehot`: the softmax is the same for
    every set of labels. Only the hooks want gradients; no parameter requires one.
    """
    logits = model(input_ids=ids, use_cache=False).logits
    seen = logits.detach()[0, :-1].float()
    normaliser = seen.logsumexp(-1)
    _refuse_non_finite(normaliser.sum(), index)
    probabilities = seen.softmax(-1)
    labels = [ids[0, 1:]] if fisher.data else []
    if fisher.draws:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        drawn = torch.multinomial(probabilities.cpu(), fisher.draws, True, generator=generator)
        labels += list(drawn.T.to(ids.device))
    gradient = torch.zeros_like(logits)
    gradient[0, :-1] = probabilities
    for number, target in enumerate(labels):
        at = target[:, None]
        _refuse_non_finite((normaliser - seen.gather(1, at)[:, 0]).sum(), index)
        likely = probabilities.gather(1, at)
        gradient[0, :-1].scatter_(1, at, (likely - 1).to(gradient.dtype))
        logits.backward(gradient, retain_graph=number + 1 < len(labels))
        gradient[0, :-1].scatter_(1, at, likely.to(gradient.dtype))


def _refuse_non_finite(nll: Tensor, index: int) -> None:
    if not bool(torch.isfinite(nll)):
        raise NumericalError(
            f"calibration window {index}: loss is {float(nll)}; the model overflows on this text; "
            "try --dtype float32 or other text"
        )


@contextmanager
def accumulating(
    view: ModelView, layers: Sequence[int], state: dict[str, Tensor]
) -> Iterator[None]:
    """Hook the model so that every forward and backward adds to `state`."""
    device = view.model.device
    required = [p for p in view.model.parameters() if p.requires_grad]
    training = view.model.training
    view.model.eval()
    with ExitStack() as stack:
        for parameter in required:
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        stack.callback(view.model.train, training)
        lowest = view.layer(min(layers))
        stack.callback(lowest.register_forward_pre_hook(_start_graph).remove)
        for layer in layers:
            state.setdefault(f"{layer}.drop", torch.zeros((), device=device, dtype=torch.float64))
            state.setdefault(
                f"{layer}.influence", torch.zeros((), device=device, dtype=torch.float64)
            )
            block = view.layer(layer)
            stack.callback(block.register_forward_hook(_block_hook(state, layer)).remove)
            for name, width in moment_widths(view, layer).items():
                state.setdefault(f"{layer}.{name}", halves.new_sum(width, device))
            for group in SAME_INPUT:
                roles = [role for role in group if role in view.roles]
                for number, role in enumerate(roles):
                    site = view.site(role, layer)
                    hook = _role_hook(state, layer, role, site.start, site.stop, number == 0)
                    module = view.model.get_submodule(site.module)
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


def _start_graph(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make the lowest layer's input the leaf that gradients flow down to, and no farther."""
    return (args[0].detach().requires_grad_(), *args[1:])


def _role_hook(
    state: dict[str, Tensor], layer: int, role: Role, start: int, stop: int, with_input: bool
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def on_gradient(grad: Tensor) -> None:
        g = grad[..., start:stop].reshape(-1, stop - start).float()
        halves.add_outer(state[f"{layer}.a.{role.value}"], g)

    def on_forward(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if with_input:
            x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
            halves.add_outer(state[f"{layer}.g.{input_key(role)}"], x)
        output.register_hook(on_gradient)

    return on_forward


def _block_hook(state: dict[str, Tensor], layer: int) -> Callable[..., None]:
    def on_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        old, new = args[0].detach().float(), after.detach().float()
        change = new - old
        cosine = nn.functional.cosine_similarity(old, new, dim=-1)
        state[f"{layer}.influence"] += (1 - cosine).double().sum()

        def on_gradient(grad: Tensor) -> None:
            state[f"{layer}.drop"] += (grad.float() * change).sum(-1).double().square().sum()

        after.register_hook(on_gradient)

    return on_forward
