"""A trained network as a file that other programs read, and what its zeros are worth."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednmap.names import InputError, choose

Metadata = dict[str, str]


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how much of it is zero.

    bytes:       of the file.
    compressed:  bytes of the file under gzip; with `compress` it is also written.
    parameters:  how many numbers.
    zeros:       share of the parameters that are exactly 0.
    zero_rows:   share of the rows (linear layers) and filters (convolutions) that are 0 as a whole.
    """

    path: Path
    bytes: int
    compressed: int
    parameters: int
    zeros: float
    zero_rows: float

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.bytes:,} bytes, {self.compressed:,} compressed; {self.parameters:,} parameters, "
            f"{self.zeros:.1%} zero, {self.zero_rows:.1%} of rows and filters zero"
        )


def _safetensors(module: nn.Module, example: Tensor | None, about: Metadata) -> bytes:
    """Weights and buffers by name, without code."""
    from safetensors.torch import save

    # contiguous copies: the format has neither strides nor shared memory
    tensors = {name: v.detach().cpu().contiguous().clone() for name, v in module.state_dict().items()}
    return save(tensors, metadata=about or None)


def _torch(module: nn.Module, example: Tensor | None, about: Metadata) -> bytes:
    """The state dict, for torch.load and load_state_dict."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.getvalue()


def _onnx(module: nn.Module, example: Tensor | None, about: Metadata) -> bytes:
    """The whole computation, for onnxruntime and others; the number of samples is free."""
    if example is None:
        raise InputError("onnx needs an example of the inputs, a tensor of some samples")
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise InputError("onnx output needs packages that are not installed: pip install 'fednmap[export]'") from None
    import logging
    import warnings

    # it reports every package that it could also export
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    # two samples: a batch of one would be taken for a fixed size
    inputs = torch.cat([example[:1], example[:1]]).to(next(module.parameters()).dtype)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # the exporter's own deprecations are not the user's
        path, samples = Path(folder) / "model.onnx", ({0: torch.export.Dim("samples")},)
        names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["outputs"]}
        torch.onnx.export(module, (inputs,), path, **names, dynamic_shapes=samples, external_data=False, verbose=False)
        whole = onnx.load(path)
    for key, value in about.items():
        whole.metadata_props.add(key=key, value=value)
    written: bytes = whole.SerializeToString()
    return written


FORMATS: dict[str, Callable[[nn.Module, Tensor | None, Metadata], bytes]] = {
    "safetensors": _safetensors,
    "onnx": _onnx,
    "torch": _torch,
}
SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt"}


def write(
    module: nn.Module,
    path: Path | str,
    format: str = "safetensors",
    *,
    example: Tensor | None = None,
    compress: bool = False,
    about: Mapping[str, Any] | None = None,
) -> ExportReport:
    """Writes the module to `path` as safetensors, onnx or torch, and reports what its zeros are worth.

    example:  some inputs, of any number of samples; onnx needs them.
    compress: also write `path` + ".gz".
    about:    what else the file says, such as the names of features and labels: each as JSON in the metadata of
              safetensors and onnx. A torch file holds the numbers alone.
    """
    path = Path(path)
    make = choose("format", format, FORMATS)
    mode = module.training
    try:
        data = make(module.eval(), example, {key: json.dumps(value) for key, value in (about or {}).items()})
    finally:
        module.train(mode)
    packed = gzip.compress(data, mtime=0)
    _whole(path, data)
    if compress:
        _whole(path.with_name(path.name + ".gz"), packed)
    count, zeros, rows = sparsity(module)
    return ExportReport(path, len(data), len(packed), count, zeros, rows)


def _whole(path: Path, data: bytes) -> None:
    """All of `data` under that name, or what was there before."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sparsity(module: nn.Module) -> tuple[int, float, float]:
    """Number of parameters, share of them that are 0, and share of whole rows and filters that are 0.

    >>> layer = nn.Linear(2, 4)
    >>> _ = layer.load_state_dict({"weight": torch.tensor([[0.0, 0], [0, 1], [1, 1], [1, 1]]), "bias": torch.ones(4)})
    >>> sparsity(layer)
    (12, 0.25, 0.25)
    """
    weights = [p.detach() for p in module.parameters()]
    count = sum(p.numel() for p in weights)
    zeros = sum(int((p == 0).sum()) for p in weights)
    rows = torch.cat([(p.flatten(1) == 0).all(1) for p in weights if p.ndim > 1] or [torch.zeros(0, dtype=torch.bool)])
    return count, zeros / max(1, count), float(rows.float().mean()) if len(rows) else 0.0
