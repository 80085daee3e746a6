"""``fedalloy doctor``: check whether everything that a run needs is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import typer

from fedalloy.cli.console import print_json, print_table
from fedalloy.cli.run import Json

NEEDED = (
    "torch", "numpy", "scipy", "pydantic", "typer", "rich", "safetensors", "filelock", "scikit-learn", "qpsolvers",
    "clarabel",
)  # fmt: skip
EXTRAS = {
    "matplotlib": ("report", "plots"),
    "pandas": ("data", "frames and tables"),
    "polars": ("data", "Polars frames"),
    "pyarrow": ("data", "parquet files"),
    "pillow": ("data", "images"),
    "datasets": ("data", "data sets of Hugging Face"),
    "flwr-datasets": ("data", "Flower Datasets"),
    "sqlalchemy": ("data", "databases"),
    "optuna": ("tune", "fedalloy tune and advise"),
    "torchmetrics": ("metrics", "metrics of torchmetrics"),
    "prometheus-client": ("metrics", "monitoring of federations"),
    "transformers": ("huggingface", "models of transformers"),
    "peft": ("huggingface", "adapters such as LoRA"),
    "flwr": ("flower", "federations"),
    "h11": ("flower", "the server of federations"),
    "ray": ("ray", "several machines"),
    "tensorboard": ("track", "TensorBoard"),
    "mlflow-skinny": ("track", "MLflow"),
    "alembic": ("track", "MLflow in a database"),
    "wandb": ("track", "Weights & Biases"),
}
"""Packages of the extras: one extra that installs each, and what it is for."""
_IMPORT_NAMES = {"scikit-learn": "sklearn"}
_LEAST_DISK = 1e9

Finding = tuple[str, str, bool]


def doctor(as_json: Json = False) -> None:
    """Check versions, threads, device, data folders and disk; exits with 1 when something needed is missing."""
    findings = [*_packages(), *_machine(), *_data(), *_disk()]
    wrong = [what for what, _, fine in findings if not fine]
    if as_json:
        print_json(
            {
                "fine": not wrong,
                "findings": [dict(zip(("what", "found", "fine"), one, strict=True)) for one in findings],
            }
        )
    else:
        print_table(["what", "found", ""], [[what, found, "" if fine else "PROBLEM"] for what, found, fine in findings])
        typer.echo(f"needs attention: {', '.join(wrong)}" if wrong else "all fine")
    raise typer.Exit(1 if wrong else 0)


def _packages() -> Iterator[Finding]:
    import sys

    import fedalloy
    from fedalloy.core import registry

    yield "fedalloy", fedalloy.__version__, True
    yield "python", sys.version.split()[0], sys.version_info >= (3, 11)
    for package in NEEDED:
        try:
            registry.load(_IMPORT_NAMES.get(package, package))
            yield package, metadata.version(package), True
        except (ImportError, metadata.PackageNotFoundError) as error:
            yield package, f"cannot be imported ({error}): pip install {package}", False
    for package, (extra, what) in EXTRAS.items():
        try:
            yield f"{package} (optional)", *_optional(package, metadata.version(package))
        except metadata.PackageNotFoundError:
            yield f"{package} (optional)", f"not installed (extra '{extra}': {what})", True


def _optional(package: str, version: str) -> tuple[str, bool]:
    """The text about a package, and whether its version is accepted: of Flower, only tested versions are."""
    from fedalloy.flower.compatibility import advice, is_tested

    return (advice(version), False) if package == "flwr" and not is_tested(version) else (version, True)


def _machine() -> Iterator[Finding]:
    import torch

    from fedalloy.core import native
    from fedalloy.experiment.recipe.resolving import cores

    yield "cores", str(cores()), True
    yield "torch threads", str(torch.get_num_threads()), True
    apple = "Apple GPU (mps)" if torch.backends.mps.is_available() else "cpu only"
    yield "device", torch.cuda.get_device_name(0) if torch.cuda.is_available() else apple, True
    compiled = native.library() is not None
    yield "compiled kernels", "in use" if compiled else "not built: small models on a CPU are slower", True


def _data() -> Iterator[Finding]:
    from fedalloy.core import registry
    from fedalloy.core.errors import FedalloyError
    from fedalloy.core.keys import Key
    from fedalloy.tasks import locate

    for folder in locate.folders():
        yield "data folder", f"{folder} ({'there' if folder.is_dir() else 'not there'})", True
    try:
        examples = len(registry.find("dataset", "digits")().load(Key.of(0)))
        yield "embedded data", f"digits, {examples} examples", examples == 1797
    except FedalloyError as error:
        yield "embedded data", str(error), False


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    yield "free disk", f"{free / 1e9:.1f} GB", free > _LEAST_DISK
