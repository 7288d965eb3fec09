"""A device that there is not: its tensors say that they are on far:0, compute on the CPU, and refuse to mix.

What a GPU would refuse, or do slowly, shows without one: tensors of two devices in one operation, a generator of the
CPU, and copies back to the CPU, which are counted. Importing this registers the device with torch, for the process.
"""

from collections import Counter

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


class Module(_DummyBackendModule):
    """torch.far: its random numbers are the CPU's."""

    def get_rng_state(self, device="far"):
        return torch.get_rng_state()

    def set_rng_state(self, state, device="far"):
        torch.set_rng_state(state)

    def manual_seed(self, seed):
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed):
        pass


_setup_privateuseone_for_python_backend("far", backend_module=Module())
FAR = torch.device("far", 0)

copied = Counter()
"""back: tensors of numbers that left the device; read: single numbers; each is a wait for the device."""

aten = torch.ops.aten


class Far(torch.Tensor):
    """A tensor on that device; `near` holds its numbers."""

    @staticmethod
    def __new__(cls, near):
        options = {"strides": near.stride(), "storage_offset": near.storage_offset(), "dtype": near.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, near.shape, **options, device=FAR)

    def __init__(self, near):
        self.near = near.detach()

    def __repr__(self):
        return f"Far({self.near})"

    @property
    def data(self):
        return Far(self.near)

    @data.setter
    def data(self, other):
        self.near = other.near

    def tolist(self):
        copied["back"] += self.ndim > 0
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        far = [isinstance(v, Far) for v in tensors]
        to = kwargs.pop("device", None)
        out_is_far = to is None or torch.device(to).type == "far"
        if func is aten._local_scalar_dense.default:
            copied["read"] += 1
            return func(args[0].near)
        if func is aten.copy_.default:
            if not far[0]:
                copied["back"] += tensors[1].ndim > 0
            args[0].near.copy_(_near(args[1])) if far[0] else args[0].copy_(args[1].near)
            return args[0]
        if not out_is_far:
            copied["back"] += tensors[0].ndim > 0
        elif any(not f and v.ndim for f, v in zip(far, tensors, strict=True)):
            raise RuntimeError(f"{func}: expected all tensors on one device, got far:0 and cpu")
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{func}: expected a generator of far:0, got one of {kwargs['generator'].device}")
        out = func(*tree_map(_near, args), **tree_map(_near, kwargs))
        if not func._schema.returns:
            return None
        if func._schema.name.endswith("_"):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        return tree_map(lambda v: Far(v) if out_is_far and isinstance(v, torch.Tensor) else v, out)


def _near(v):
    return v.near if isinstance(v, Far) else v


def _empty(size, **options):
    return Far(torch.empty(size, dtype=options.get("dtype"), device="cpu"))


def _empty_strided(size, stride, **options):
    return Far(torch.empty_strided(size, stride, dtype=options.get("dtype"), device="cpu"))


def _copy_from(source, target, non_blocking=False):
    _near(target).copy_(_near(source))
    return target


_library = torch.library.Library("aten", "IMPL")
_library.impl("empty.memory_format", _empty, "PrivateUse1")
_library.impl("empty_strided", _empty_strided, "PrivateUse1")
_library.impl("_copy_from", _copy_from, "PrivateUse1")
_library.impl("tril_indices", lambda *sizes, **options: Far(torch.tril_indices(*sizes)), "PrivateUse1")


def sent(v):
    """A tensor on the device."""
    return Far(v.detach())


def moved(module):
    """The module with its parameters and buffers on the device, in place."""
    for layer in module.modules():
        for name, p in list(layer.named_parameters(recurse=False)):
            layer._parameters[name] = torch.nn.Parameter(sent(p), requires_grad=p.requires_grad)
        for name, b in list(layer.named_buffers(recurse=False)):
            layer._buffers[name] = sent(b)
    return module
