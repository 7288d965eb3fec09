"""`fednmap export`: a trained model of a run folder, as a file for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from fednmap.commands.options import Json, TrustCode
from fednmap.data.sparse import is_sparse, take
from fednmap.models.export import FORMATS, SUFFIXES, write
from fednmap.models.prune import prunable
from fednmap.models.prune import prune as pruned
from fednmap.names import InputError, choose
from fednmap.problems import GLM, FiniteSum, Network
from fednmap.runs.atomic_files import clear_errors, json_text
from fednmap.runs.experiment import prepare
from fednmap.runs.folder import Job, Model, RunFolder


def export(
    run: Annotated[Path, typer.Argument(help="Run folder of train, compare, fit or flower.")],
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))] = "safetensors",
    method: Annotated[str | None, typer.Option(help="Method; default the only one, else the first.")] = None,
    trial: Annotated[int, typer.Option(help="Repetition, counted from 0.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default RUN/METHOD-TRIAL, or METHOD-TRIAL-pruned, and a suffix.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove zero rows and filters of mlp and cnn; if there are none, compress.")
    ] = False,
    compress: Annotated[bool, typer.Option("--compress", help="Also write the file packed with gzip.")] = False,
    trust_code: TrustCode = False,
    json: Json = False,
) -> None:
    """Write a trained model as safetensors, onnx or torch, and print its size with and without zeros.

    Example: fednmap export runs/RUN --format onnx --prune
    """
    choose("format", format, FORMATS)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise InputError(f"cannot write {out}: name a file in a folder that exists")
    folder = RunFolder.open(run)
    methods, labels = folder.about().algorithms, folder.about().labels
    if not methods and method is None:
        raise InputError(f"{folder.path / 'run.toml'} names no method; put it back from a copy, or give --method")
    # also found as tables show it (its label, or the Name of package.module:Name), and as its files are called
    called = {m: (None, m, labels.get(m, m), m.rpartition(":")[2], m.replace(":", ".")) for m in methods}
    method = next((m for m, names in called.items() if method in names), method)
    job = Job(str(method), trial)
    saved = folder.model(job)
    if saved is None:
        there = sorted(p.stem for p in folder.model_path(job).parent.glob("*.safetensors"))
        raise InputError(f"{folder.path} has no finished model {job}; it has {', '.join(there) or 'none'}")
    module, example = trained(folder, job, saved, trust_code)
    about: dict[str, Any] = {}
    if saved.features or saved.labels:
        about = {"features": list(saved.features), "labels": list(saved.labels)}
    if saved.scaling[0] and (example is None or list(saved.parameters) != ["x"]):  # a linear layer has it in itself
        about |= {"shift": list(saved.scaling[0]), "scale": list(saved.scaling[1])}
    if example is None and format == "onnx":
        if not folder.made_in_python():
            raise InputError("onnx holds the whole computation, which only the clients know; use safetensors or torch")
        raise InputError(
            f"expected safetensors or torch, got onnx: {run} was made in Python and holds the parameters alone"
            '; use fednmap.models.export.write(result.module(), "model.onnx", "onnx", example=inputs) there'
        )
    before = sum(p.numel() for p in module.parameters())
    if prune and prunable(module):
        module = pruned(module)
    smaller = sum(p.numel() for p in module.parameters()) < before
    path = out or run / f"{job}{'-pruned' if smaller else ''}{SUFFIXES[format]}"
    with clear_errors(path):
        packed = compress or (prune and not smaller)
        report = write(module, path, format, example=example, compress=packed, about=about)
    if json:
        print(json_text(asdict(report) | {"path": str(path), "parameters_before": before} | about))
        return
    print(report)
    if smaller:
        print(f"pruned: {before:,} parameters before, {report.parameters:,} after")
    elif prune and prunable(module):
        print(f"not pruned: no hidden unit is unused, and the zeros are single weights; {path}.gz is packed")
    elif prune:
        print(f"not pruned: the model is not a row of layers without normalisation; {path}.gz is packed")


def trained(folder: RunFolder, job: Job, saved: Model, trust: bool) -> tuple[nn.Module, Tensor | None]:
    """Return the model as a torch module, ready for use, and some inputs to try it on.

    Where the data stays with the clients of a federation: the tensors as they were saved, and None.
    """
    if folder.made_in_python() or folder.about().data == "own":
        return holding(saved.parameters), None
    if folder.about().made_in == "fit":  # a linear layer on the encoded columns
        p = len(saved.features)
        outputs = saved.parameters["x"].numel() // (p + 1)
        weight, bias = saved.parameters["x"].split([outputs * p, outputs])
        return linear(weight.view(outputs, p), bias), torch.zeros(2, p, dtype=weight.dtype)
    config = folder.config(trust=trust)
    experiment = prepare(config.model_copy(update={"seed": config.seed + job.trial}))
    problem, scaling = experiment.problem, experiment.dataset.scaling
    if saved.scaling[0]:  # the run's own, whatever the data are now
        shift, scale = (torch.tensor(part, dtype=torch.float64) for part in saved.scaling)
        scaling = shift, scale
    elif scaling is not None:
        folder.check_data_digest(experiment.digest)
    x = problem.flat(saved.parameters) if isinstance(problem, Network) else saved.parameters["x"]
    if x.numel() != problem.dim:
        raise InputError(f"the data of {folder.path} have changed since the run: put them back to export its model")
    few = take(problem.data.x, slice(0, 2))
    return as_module(problem, x.to(problem.data.x.device), scaling), few.to_dense() if is_sparse(few) else few


def holding(tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a module that holds these tensors under these names, and computes nothing.

    >>> list(holding({"x": torch.zeros(2), "0.weight": torch.ones(1)}).state_dict())
    ['x', '0.weight']
    """
    root = nn.Module()
    for name, v in tensors.items():
        *path, last = name.split(".")
        place = root
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, nn.Parameter(v, requires_grad=False))
    return root


def as_module(problem: FiniteSum, x: Tensor, scaling: tuple[Tensor, Tensor] | None) -> nn.Module:
    """Return the model x of a problem; regressions become one linear layer, with a bias where they have an intercept.

    Binary logistic regression gives one score per sample, positive for label 1.

    scaling: the shift and scale of standardised columns; a linear model then takes the columns as they were given.
    """
    if isinstance(problem, Network):
        return problem.module(x)
    if not isinstance(problem, GLM):
        raise InputError(f"a {type(problem).__name__} cannot be exported; a linear model or a network can")
    weight, bias = x[problem.coefficients].view(-1, problem.features), x[problem.intercepts]
    if scaling is not None:
        shift, scale = (part.to(weight) for part in scaling)
        weight = weight / scale
        bias = bias - weight @ shift if problem.intercept else bias
    return linear(weight, bias if problem.intercept else None)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a linear layer with these numbers, (outputs, features) and (outputs,)."""
    outputs, features = weight.shape
    layer = nn.Linear(features, outputs, bias=bias is not None, dtype=weight.dtype, device=weight.device)
    numbers = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(numbers)
    return nn.Sequential(nn.Flatten(), layer, *([nn.Flatten(0)] if outputs == 1 else [])).eval()
