"""The strategies for `backend="horovod"`: "ddp", which averages gradients over the workers, and "none".

Horovod averages gradients in the optimizer. `hvd.DistributedOptimizer` sends each gradient once a backward pass has
computed it, and waits for the averages in `step`. raysgd waits at the end of the backward pass instead. Code between
the backward pass and the step, such as clipping, unscaling, or a second backward pass, thus works on averaged
gradients. An operator therefore trains the same with Horovod and with `DistributedDataParallel`.

ADR 23 explains why the backward pass waits.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from raysgd.core.connections.horovod import import_horovod, is_connection_error
from raysgd.core.private_names import require_names
from raysgd.exceptions import InvalidRegistrationError
from raysgd.torch.checkpoints.checkpoint_file import load_plain
from raysgd.torch.objects.loading import check_optimizer, with_own_options
from raysgd.torch.parallel.strategy import Strategy, Summation
from raysgd.torch.parallel.sync import GradientSync

_NUM_NAMES_OF_SUMS = 8  # number of names for sums; all ranks finish a sum before its name is reused


class HorovodSync(GradientSync):
    """Averages the gradients of wrapped optimizers. Their compression object, which gets each gradient, is this object.

    Args:
        world_size: Number of ranks.
    """

    is_lost = staticmethod(is_connection_error)

    def __init__(self, world_size: int) -> None:
        self.averages = world_size > 1
        super().__init__()
        self._hvd = import_horovod()
        self._optimizers: list[Any] = []
        self._num_sums, self._backward_pass = 0, -1

    @property
    def num_ranks(self) -> int:
        return int(self._hvd.size()) if self.averages else 1

    def start_sum(self, numbers: torch.Tensor) -> Callable[[], Any]:
        self._num_sums += 1
        name = f"raysgd.sum.{self._num_sums % _NUM_NAMES_OF_SUMS}"
        return partial(self._hvd.synchronize, self._hvd.allreduce_async_(numbers, name=name, op=self._hvd.Sum))

    def compress(self, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return a gradient times this rank's weight, and None. Horovod calls this before it sends the gradient."""
        gradient = gradient.contiguous()  # Horovod requires contiguous tensors
        self.leg.multiply(gradient)
        return gradient, None

    def decompress(self, gradient: torch.Tensor, context: None) -> torch.Tensor:
        """Return the averaged gradient unchanged. Horovod calls this method to undo `compress`."""
        return gradient

    def watch(self, optimizer: Any) -> None:
        """Wait for the averages of an optimizer's gradients at the end of each backward pass."""
        self._optimizers.append(optimizer)
        for parameter in _trained_by(optimizer):
            parameter.register_post_accumulate_grad_hook(self._note_backward)

    def _note_backward(self, parameter: torch.Tensor) -> None:
        """Schedule `_finish_backward` for the end of the running backward pass. Called for each computed gradient."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._backward_pass:
            self._backward_pass = backward_pass
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self.leg.flight_recorder.note("gradients were exchanged")
        with self.leg.record.noting_lost_connections(self.is_lost):
            for each in self._optimizers:
                each.synchronize()


class HorovodByHand(Strategy):
    """The strategy "none" with `backend="horovod"`: the user keeps the workers' models in sync."""

    def __init__(self, sync: GradientSync | None = None) -> None:
        super().__init__(sync)
        self._hvd = import_horovod()

    def all_sum(self, tensor: torch.Tensor) -> None:
        self._hvd.allreduce_(tensor, name="raysgd.sum", op=self._hvd.Sum)


class HorovodParallel(HorovodByHand):
    """The strategy "ddp" with `backend="horovod"`. It wraps optimizers instead of models.

    Args:
        world_size: Number of ranks.
    """

    sync: HorovodSync

    def __init__(self, world_size: int) -> None:
        super().__init__(HorovodSync(world_size))
        require_names(torch._C, "_current_graph_task_id")
        require_names(torch.autograd.Variable, "_execution_engine")
        self._pairs: list[tuple[Any, Any]] = []  # for each optimizer: the user's object and its wrapper
        self._averaged: set[torch.Tensor] = set()
        self._num_models = 0

    def wrap(self, model: torch.nn.Module, device_ids: list[int] | None, options: dict[str, Any]) -> torch.nn.Module:
        """Copy rank 0's parameters and buffers into the model, and return the model."""
        self._num_models += 1
        self._take_from_rank_0(f"model.{self._num_models}", [*model.parameters(), *model.buffers()])
        return model

    def _take_from_rank_0(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            handles = [
                self._hvd.broadcast_async(tensor.contiguous(), 0, name=f"raysgd.{what}.{index}")
                for index, tensor in enumerate(tensors)
            ]
            for tensor, handle in zip(tensors, handles, strict=True):
                tensor.copy_(self._hvd.synchronize(handle))

    def wrap_optimizer(self, optimizer: Any) -> Any:
        """Return a wrapped optimizer that averages gradients over the ranks. Its state is copied from rank 0.

        Raises:
            InvalidRegistrationError: Horovod does not support this optimizer, or another registered optimizer has one
                of its parameters.
        """
        for plain, wrapped in self._pairs:
            if optimizer is plain or optimizer is wrapped:
                return wrapped
        self._check(optimizer)
        wrapped = self._distributed(optimizer)
        self._pairs.append((optimizer, wrapped))
        if self.sync.averages:
            self._take_state_of_rank_0(optimizer, wrapped)
            self._averaged.update(_trained_by(wrapped))
            self.sync.watch(wrapped)
        return wrapped

    def _check(self, optimizer: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidRegistrationError(
                f"`register(optimizers=...)` got `{type(optimizer).__name__}`: Horovod needs a "
                '`torch.optim.Optimizer`. With another kind use `backend="gloo"` or "nccl".'
            )
        taken = {id(parameter) for _, wrapped in self._pairs for parameter in _parameters_of(wrapped)}
        if any(id(parameter) in taken for parameter in _parameters_of(optimizer)):
            raise InvalidRegistrationError(
                "Two optimizers have a parameter in common: Horovod would average its gradient twice. Give each "
                'parameter to one optimizer, or use `backend="gloo"` or "nccl".'
            )

    def _distributed(self, plain: torch.optim.Optimizer) -> Any:
        names = [
            (f"raysgd.optimizer.{len(self._pairs)}.{group_index}.{index}", parameter)
            for group_index, group in enumerate(plain.param_groups)
            for index, parameter in enumerate(group["params"])
        ]
        try:
            wrapped = self._hvd.DistributedOptimizer(plain, named_parameters=names, compression=self.sync)
        except TypeError as error:
            raise InvalidRegistrationError(
                f"Horovod creates `{type(plain).__name__}` again from its parameter groups alone, and this failed: "
                f"{error}. Give the other arguments of its constructor default values."
            ) from error
        require_names(wrapped, "_handles")
        wrapped.defaults, wrapped.state = plain.defaults, plain.state
        _adapt_class_of(wrapped, type(plain))
        _keep_in_touch(plain, wrapped)
        return wrapped

    def _take_state_of_rank_0(self, plain: torch.optim.Optimizer, wrapped: Any) -> None:
        # Horovod's functions for states and objects unpickle what arrives, and anyone can connect to Horovod. They also
        # step an optimizer that has no state yet. What arrives is therefore read and checked like a file of a stranger.
        name, content = f"raysgd.state.{len(self._pairs)}", io.BytesIO()
        torch.save(wrapped.state_dict(), content)
        own = torch.frombuffer(content.getbuffer(), dtype=torch.uint8)
        size = int(self._hvd.broadcast(torch.tensor([len(own)]), 0, name=f"{name}.size"))
        sent = own if self._hvd.rank() == 0 else torch.empty(size, dtype=torch.uint8)
        received = self._hvd.broadcast(sent, 0, name=name)
        if self._hvd.rank():
            state = load_plain(io.BytesIO(received.numpy().tobytes()), size)
            check_optimizer(plain, state, [group["params"] for group in plain.param_groups])
            self.load_optimizer(wrapped, with_own_options(plain, state))

    def rewrap(self, models: Sequence[torch.nn.Module], is_agreed: bool = False) -> None:
        if self.sync.averages and any(not self._averaged.issuperset(_trained_by(each)) for _, each in self._pairs):
            raise ValueError(
                "Parameters were unfrozen (`requires_grad=True`) since `register`, but Horovod averages only the "
                "gradients of parameters that were trainable then. Register them unfrozen, in a group with a learning "
                'rate of 0 until they are needed, or use `backend="gloo"` or "nccl".'
            )

    def left_out_of(self, model: torch.nn.Module) -> Collection[str] | None:
        return () if self.sync.averages else None

    @contextmanager
    def evaluating(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Copy rank 0's buffers to every rank. With Horovod, forward passes call no collectives that could block."""
        if self.sync.averages:
            self._take_from_rank_0("buffer", [buffer for model in models for buffer in model.buffers()])
        yield

    def summation(self) -> Summation:
        return self.sync.start_sum


def _adapt_class_of(wrapped: Any, plain_cls: type[torch.optim.Optimizer]) -> None:
    """Change the class of a Horovod optimizer so that `step` does not average gradients again.

    In addition, `zero_grad` first waits for running all-reduces, and `add_param_group` raises an error. Horovod creates
    a class for each optimizer, so the changes affect no other optimizer.

    Args:
        wrapped: Optimizer that Horovod returned.
        plain_cls: Class of the optimizer that the user registered.
    """
    cls = type(wrapped)
    original_synchronize, original_step = cls.synchronize, cls.step

    def synchronize(self: Any) -> None:
        """Wait until all gradients are averaged.

        Usually, the end of the backward pass has already waited.
        """
        if self._handles:
            original_synchronize(self)

    def step(self: Any, closure: Any = None) -> Any:
        self.synchronize()
        with self.skip_synchronize():
            return original_step(self, closure)

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        self.synchronize()
        plain_cls.zero_grad(self, *args, **kwargs)

    def add_param_group(self: Any, param_group: Any) -> None:
        raise RuntimeError(
            "Horovod averages only the gradients of parameters that an optimizer had when it was registered, so no "
            "group can be added now. Add it before `register`, with a learning rate of 0 until it is needed."
        )

    step.hooked = True  # type: ignore[attr-defined]  # tells PyTorch that `step` already calls the optimizer's hooks
    cls.synchronize, cls.step, cls.zero_grad, cls.add_param_group = synchronize, step, zero_grad, add_param_group


def _keep_in_touch(plain: torch.optim.Optimizer, wrapped: Any) -> None:
    """Let the user's plain optimizer share the wrapped optimizer's parameter groups and state.

    Learning rate schedulers change the plain optimizer, and their changes thus apply to the wrapped optimizer, too.
    Stepping the plain optimizer raises an error, because its gradients would not be averaged.
    """

    def share(optimizer: Any) -> None:
        plain.param_groups, plain.state = wrapped.param_groups, wrapped.state

    def tell(optimizer: Any, args: Any, kwargs: Any) -> None:
        plain._opt_called = True  # type: ignore[attr-defined]  # schedulers check that the optimizer has stepped

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        raise RuntimeError(
            "This optimizer was passed to `register`, which returned another optimizer that averages the gradients of "
            "the same parameters over the workers. Step the returned optimizer."
        )

    share(wrapped)
    wrapped.register_load_state_dict_post_hook(share)
    wrapped.register_step_post_hook(tell)
    plain.register_step_pre_hook(refuse)


def _trained_by(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for parameter in _parameters_of(optimizer) if parameter.requires_grad]


def _parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
