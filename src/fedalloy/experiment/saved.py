"""A result as a folder that any program can read: safetensors and JSON. Reading it executes nothing.

| file | content |
|---|---|
| ``model.safetensors`` | parameters and buffers of the global model |
| ``client-3.safetensors`` | those of client 3's own model, for clients that were saved |
| ``preparation.safetensors`` | each client's centre, spread and values for gaps, where the task has them |
| ``result.json`` | name, seed, status, round, scores, every round, how raw rows are prepared, names of clients |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.types import Tree
from fedalloy.experiment import predicting
from fedalloy.experiment.calling_clients import Client, named
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.stream import encode
from fedalloy.experiment.saved_model import ModelBuilder
from fedalloy.tasks.calling import called
from fedalloy.tasks.preparing import Preparation
from fedalloy.tasks.sources import raw_rows

FORMAT = 2
_JSON, _MODEL, _STEPS = "result.json", "model.safetensors", "preparation.safetensors"
_CLIENT = re.compile(r"client-(\d+)\.safetensors")
_NEEDED = {"format": int, "name": str, "seed": int, "status": str, "round": int, "metric": str, "rounds": list}
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, repr=False)
class SavedResult:
    """A result that was saved. ``model`` are parameters and buffers of the global model, ``clients`` those of clients
    whose own model was saved; ``rows`` has one row per round. ``preparation`` is what was done to raw rows (None: saved
    by a version that did not say it); ``floats`` says that whole numbers reach the model as floats; ``names`` are the
    numbers of clients that have a name and whose model or preparation was saved; ``encoding`` says what the numbers of
    encoded columns mean, classes among them."""

    name: str
    seed: int
    status: str
    round: int
    metric: str
    model: Tree
    clients: Mapping[int, Tree] = field(default_factory=dict)
    rows: tuple[dict[str, Any], ...] = ()
    preparation: Preparation | None = None
    floats: bool = False
    names: Mapping[str, int] = field(default_factory=dict)
    encoding: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    build: ModelBuilder | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        own = f", {len(self.clients)} personal model{'s' if len(self.clients) > 1 else ''}" if self.clients else ""
        return f"<saved {self.name}, seed {self.seed}: {self.status} in round {self.round}{own}>"

    def rounds(self) -> Iterator[dict[str, Any]]:
        """One row per round, as a run folder has them."""
        return iter(self.rows)

    @overload
    def module(self, module: Module, client: Client | None = None) -> Module: ...

    @overload
    def module(self, module: None = None, client: Client | None = None) -> nn.Module: ...

    def module(self, module: nn.Module | None = None, client: Client | None = None) -> nn.Module:
        """Your module with the saved weights, in evaluation mode; a model that was given to the task by name
        (``"mlp"``) is built again. Trainable leaves of your module must be those of the saved model; frozen ones
        (``requires_grad = False``) and constant buffers are not saved, and stay as they are."""
        wanted = self.model if client is None else self._own(client)
        module = self._built() if module is None else module
        if not isinstance(module, nn.Module):
            raise SpecError(f"module takes your module, such as module(YourModel()), got {module!r}")
        not_its = f"{type(module).__name__} is not the model that was saved"
        if missing := _missing(module, wanted):
            advice = "freeze what was not trained (requires_grad = False)"
            raise SpecError(f"{not_its}: no weights for {', '.join(missing[:3])}; {advice}")
        if strange := [name for name in wanted if name not in module.state_dict()]:
            raise SpecError(f"{not_its}: it has no {', '.join(strange[:3])}")
        try:
            module.load_state_dict(dict(wanted), strict=False)
        except RuntimeError as error:
            raise SpecError(f"{not_its}: {error}") from None
        return module.eval()

    def _built(self) -> nn.Module:
        if self.build is None:
            raise SpecError("the saved model was not one of fedalloy's by name: give your module, module(YourModel())")
        return self.build(self.model)

    def prepare(self, x: Any, rows_of: Client | None = None) -> Any:
        """Raw rows as the model gets them, as ``result.prepare`` makes them."""
        if self.preparation is None:
            raise SpecError(
                "this result was saved by a version that did not save how raw rows are prepared: save it again, or "
                "give rows as the model gets them, prepared=True"
            )
        return raw_rows.prepare(x, self.preparation, None if rows_of is None else self._number(rows_of))

    def predict(
        self,
        module: nn.Module,
        x: Any = None,
        client: Client | None = None,
        *,
        rows_of: Client | None = None,
        prepared: bool = False,
    ) -> Tensor:
        """The outputs of your module with the saved weights, for raw rows; the arguments are those of
        ``result.predict``."""
        if not isinstance(module, nn.Module) or x is None:
            given = type(module).__name__
            raise SpecError(
                f"predict: the first argument is a {given}; the order is predict(module, x), and "
                "predict(saved.module(), x) for a model that was given by name"
            )
        filled = self.module(module, client)
        rows = predicting.rows_for(x, self.prepare, client, rows_of, prepared)
        return predicting.outputs(lambda part: called(filled, part), rows, dict(filled.named_parameters()), self.floats)

    def _own(self, client: Client) -> Tree:
        number = self._number(client)
        if number not in self.clients:
            called = {number: f" ({name})" for name, number in self.names.items()}
            known = ", ".join(f"{one}{called.get(one, '')}" for one in self.clients) or "none"
            raise SpecError(f"the model of client {client} was not saved; saved clients: {known}")
        return self.clients[number]

    def _number(self, client: Client) -> int:
        return named(client, self.names, "its number")


def _missing(module: nn.Module, given: Tree) -> list[str]:
    """The trainable leaves of a module without saved values; tied leaves are saved once, under either name."""
    leaves = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(leaf) for name, leaf in leaves.items() if name in given}
    return [name for name, leaf in leaves.items() if leaf.requires_grad and id(leaf) not in tied]


def write(folder: Path, told: Mapping[str, Any], model: Tree, clients: Mapping[int, Tree], steps: Preparation) -> Path:
    """Write a result into a new or empty folder; ``result.json`` comes last, so that a folder with it is complete."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not an empty folder: choose another one")
    atomic.make_folder(folder)
    trees = {_MODEL: model, **{f"client-{one}.safetensors": tree for one, tree in clients.items()}}
    trees |= {_STEPS: steps.tensors()} if steps.tensors() else {}
    for name, tree in trees.items():
        leaves = {leaf: value.detach().cpu().clone().contiguous() for leaf, value in tree.items()}
        atomic.write_atomically(folder / name, partial(save_file, leaves))
    atomic.write_text(folder / _JSON, encode({"format": FORMAT, **told, "preparation": steps.told()}) + "\n")
    return folder


def load(folder: str | Path) -> SavedResult:
    """Read a result that ``result.save(folder)`` wrote. Nothing in it is executed."""
    if not isinstance(folder, str | Path):
        raise SpecError(f"load takes the path of a folder that result.save wrote, got {folder!r}")
    place = Path(folder)
    told = _told(place / _JSON)
    clients = {int(found[1]): file for file in place.iterdir() if (found := _CLIENT.fullmatch(file.name))}
    return SavedResult(
        told["name"],
        told["seed"],
        told["status"],
        told["round"],
        told["metric"],
        _leaves(place / _MODEL),
        {client: _leaves(clients[client]) for client in sorted(clients)},
        tuple(told["rounds"]),
        _preparation(place, told),
        told.get("floats") is True,
        _names(place, told),
        _encoding(place, told),
        _builder(place, told),
    )


def _preparation(place: Path, told: Mapping[str, Any]) -> Preparation | None:
    """How raw rows are prepared; None in a folder of a version that did not say it."""
    if told["format"] == 1:
        return None
    file = place / _STEPS
    try:
        return Preparation.read(told["preparation"], _leaves(file) if file.exists() else {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{place / _JSON}: how rows are prepared cannot be read ({error!r})") from None


def _names(place: Path, told: Mapping[str, Any]) -> dict[str, int]:
    """The numbers of clients by name; earlier versions did not save them."""
    names = told.get("names", {})
    if not isinstance(names, dict) or any(type(number) is not int for number in names.values()):
        raise CheckpointError(f"{place / _JSON}: the names of clients cannot be read")
    return names


def _encoding(place: Path, told: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What numbers of encoded columns mean; earlier versions did not save it."""
    try:
        return {name: tuple(map(str, values)) for name, values in told.get("encoding", {}).items()}
    except (AttributeError, TypeError):
        raise CheckpointError(f"{place / _JSON}: the encoding of columns cannot be read") from None


def _builder(place: Path, told: Mapping[str, Any]) -> ModelBuilder | None:
    """How a named model is built; earlier versions did not save it."""
    if told.get("model") is None:
        return None
    try:
        return ModelBuilder.read(told["model"])
    except (KeyError, TypeError, AttributeError, ValueError, SpecError) as error:
        raise CheckpointError(f"{place / _JSON}: how the model is built cannot be read ({error})") from None


def _told(file: Path) -> dict[str, Any]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{file.parent} holds no saved result (no {_JSON}); result.save writes one") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    wrong = [name for name, kind in _NEEDED.items() if not isinstance(told, dict) or type(told.get(name)) is not kind]
    if wrong:
        raise CheckpointError(f"{file} is no saved result: '{wrong[0]}' is missing or of another type")
    if told["format"] not in (1, FORMAT):
        raise CheckpointError(
            f"{file} has format {told['format']}; this version of fedalloy reads 1 and {FORMAT}: update it"
        )
    return dict(told)


def _leaves(file: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = load_file(str(file))
    except (SafetensorError, OSError, torch.OutOfMemoryError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    return found
