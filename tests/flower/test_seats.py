"""Who is which client: the node in its seat, by name and key, whoever comes first; and who has a seat at all."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import Error
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower import admission
from fedalloy.flower.database import entries
from fedalloy.flower.engine import FederationError
from fedalloy.flower.flwr_cli import FlwrCli
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.members import add, replace_key
from fedalloy.flower.node_registry import Node, NodeRegistry, Seat, identity_of
from fedalloy.flower.pki import make_node_key, public_half
from fedalloy.flower.programs import SEATS
from fedalloy.flower.project_templates import FederationPlan, write_federation
from tests.flower.fake import FakeNode, federation, play, recipe_file
from tests.flower.server_records import Records

pytestmark = pytest.mark.flower
TWO = {"minimum": 2, "deadline": 20.0}


def seats_of(grid: Any, names: tuple[str, ...] = ("north", "south", "west")) -> list[Seat]:
    keys = [node.key.encode() for node in grid.nodes.values()]
    return [Seat(name, identity_of(key)) for name, key in zip(names, keys, strict=False)]


def test_an_impostor_who_comes_first_gets_nothing(tmp_path):
    grid = federation(tmp_path)
    seats = seats_of(grid)
    # It has a registered key, but the seat of nobody, and Flower lists it first.
    grid.nodes = {1: FakeNode("another key", grid.nodes[101].config), **grid.nodes}
    grid.nodes[101].online = False
    recipe = recipe_file(tmp_path, engine=TWO, run={"rounds": 2})

    def comes(text: str) -> None:
        grid.nodes[101].online |= "round 1/2" in text

    play(recipe, tmp_path / "run", grid, say=comes, seats=lambda: seats)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 2], [0, 1, 2]]
    assert rows[0]["dropped"]["1"] == "the node of 'south' is not connected"
    (why,) = rows[0]["refused"].values()
    assert f"it says it is '1', but that is the node with {seats[1].identity}" in why
    assert "in the server's nodes/" in why
    assert "train" not in grid.nodes[1].seen


def test_records_logs_and_commands_have_the_names_that_the_operator_gave(tmp_path):
    """Also of a site that has its seat only when the run is continued."""
    grid = federation(tmp_path)
    seats, said = seats_of(grid)[:2], list[str]()
    grid.nodes[101].tamper = lambda content: Error(2, "broken")
    recipe = recipe_file(tmp_path, engine={**TWO, "wait": 5.0}, run={"rounds": 1})
    with pytest.raises(FederationError, match="south: its app raised an error"):
        play(recipe, tmp_path / "run", grid, say=said.append, seats=lambda: seats)
    assert read_run(tmp_path / "run").manifest == {"names": ["north", "south", "2"]}
    seats = seats_of(grid)
    play(recipe, tmp_path / "run", grid, say=said.append, seats=lambda: seats)
    assert read_run(tmp_path / "run").manifest == {"names": ["north", "south", "west"]}
    assert any("round 1/1: north, west" in text and "(without south: its app raised" in text for text in said)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert "dropped in round 1, south: its app raised an error" in shown.output
    told = CliRunner().invoke(app, ["flower", "status", str(tmp_path / "run")])
    assert "south" in told.output


def test_a_site_that_is_admitted_in_the_middle_of_a_run_has_its_name_at_once(tmp_path):
    grid = federation(tmp_path)
    seats, said = seats_of(grid)[:2], list[str]()

    def follow(text: str) -> None:
        said.append(text)
        if "round 1/3" in text:
            seats.append(seats_of(grid)[2])

    play(recipe_file(tmp_path, engine=TWO), tmp_path / "run", grid, say=follow, seats=lambda: seats)
    assert any("round 1/3: north, south" in text and "no key is admitted for '2'" in text for text in said)
    assert any("round 2/3: north, south, west" in text for text in said)
    assert read_run(tmp_path / "run").manifest == {"names": ["north", "south", "west"]}


def test_a_seat_that_is_taken_away_or_given_to_another_key_counts_in_the_next_round(tmp_path):
    grid = federation(tmp_path)
    seats = seats_of(grid)
    grid.nodes[200] = FakeNode("a new key", grid.nodes[102].config)

    def change(text: str) -> None:
        if "round 1/3" in text:
            seats[2] = Seat("west", "")
        if "round 2/3" in text:
            seats[2] = Seat("west", identity_of(b"a new key"))

    play(recipe_file(tmp_path, engine=TWO), tmp_path / "run", grid, say=change, seats=lambda: seats)
    rows = list(read_run(tmp_path / "run").rounds())
    assert [row["ids"] for row in rows] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert "no admitted key has this seat" in str(rows[1]["refused"])
    assert grid.nodes[102].seen.count("train") == 1
    assert grid.nodes[200].seen.count("train") == 1


def test_a_node_in_the_wrong_seat_refuses_by_itself(tmp_path):
    grid = federation(tmp_path)
    swapped = seats_of(grid)[::-1]
    recipe = recipe_file(tmp_path, engine={"minimum": 1}, run={"rounds": 1})
    play(recipe, tmp_path / "run", grid, seats=lambda: swapped)
    (row,) = read_run(tmp_path / "run").rounds()
    assert row["ids"] == [1]
    assert "the order is for '0', this node is '2'" in row["dropped"]["0"]


class TestStrategy:
    def test_clients_have_the_numbers_of_their_seats_in_whatever_order_they_come(self):
        nodes = [Node(n, identity_of(b"%d" % n)) for n in (30, 10, 20, 99)]
        seats = [Seat(str(n), identity_of(b"%d" % n)) for n in (10, 20, 30)]
        registry = NodeRegistry.unnamed(None, nodes[:1], seats)
        assert len(registry.names) == 3
        assert registry.place(nodes[:1], seats) == []
        assert registry.place(nodes, seats) == [nodes[3]]
        assert numbers(registry, nodes) == {0: 10, 1: 20, 2: 30}
        exchanged = [*seats[:2], Seat("30", identity_of(b"99"))]
        assert registry.place(nodes, exchanged) == [nodes[0]]
        assert numbers(registry, nodes) == {0: 10, 1: 20, 2: 99}
        assert registry.place(nodes[:1], exchanged) == [nodes[0]], "not even while the new key is away"
        assert numbers(registry, nodes[:1]) == {}
        assert len(NodeRegistry.unnamed(2, nodes, seats).names) == 2

    def test_without_seats_places_are_given_by_name(self):
        nodes = [Node(n, f"node {n}", name=name) for n, name in ((1, "b"), (2, "a"))]
        registry = NodeRegistry.unnamed(None, nodes, None)
        assert registry.place(nodes) == []
        assert numbers(registry, nodes) == {0: 2, 1: 1}
        assert registry.place([Node(3, "node 3"), *nodes]) == [Node(3, "node 3")], "no place is left"

    def test_a_checkpoint_remembers_who_had_which_place(self):
        nodes = [Node(n, f"node {n}", name=name) for n, name in ((1, "b"), (2, "a"))]
        registry = NodeRegistry.unnamed(3, nodes, None)
        registry.place(nodes)
        registry.present(nodes)
        assert registry.to_json() == {"2": 0, "1": 1}
        again = NodeRegistry.from_json(registry.to_json(), 3)
        new = Node(3, "node 3", name="_")
        assert again.place([new, *nodes]) == []
        assert numbers(again, [new, *nodes]) == {0: 2, 1: 1, 2: 3}
        assert len(NodeRegistry.from_json({"7": 2}).names) == 3, "a place that nobody has taken yet is one"


def numbers(registry: NodeRegistry, nodes: list[Node]) -> dict[int, int]:
    return {client: node.number for client, node in registry.present(nodes).items()}


class Shell:
    """Flower's table of nodes, and the commands that change it."""

    def __init__(self, place: ServerPlace) -> None:
        self.place, self.said = place, list[str]()
        with closing(sqlite3.connect(place.database)) as database, database:
            times = "last_activated_at, last_deactivated_at, online_until"
            database.execute(f"CREATE TABLE node (node_id BIGINT, name, public_key BLOB UNIQUE, status, {times})")

    def ask(self, *words: str) -> dict[str, Any]:
        self.said.append(" ".join((words[1], Path(words[2]).name)))
        with closing(sqlite3.connect(self.place.database)) as database, database:
            if words[1] == "unregister":
                change = "UPDATE node SET status = 'unregistered' WHERE node_id = ?"
                assert database.execute(change, (int(words[2]) - 2**64,)).rowcount == 1
                return {}
            row = (-1 - len(self.said), words[5], admission.public_key(Path(words[2])), "registered")
            database.execute("INSERT INTO node VALUES (?, ?, ?, ?, NULL, NULL, NULL)", row)
            return {"node-id": str(2**64 + row[0])}


@pytest.fixture
def place(tmp_path: Path) -> ServerPlace:
    write_federation(tmp_path / "fed", FederationPlan(("north", "south", "east")))
    return ServerPlace.read(tmp_path / "fed" / "server")


def let_in(place: ServerPlace) -> list[str]:
    return sorted(one.name for one in entries(place) if one.status != "unregistered")


def test_who_is_let_in_is_decided_by_the_keys_that_lie_there(place, tmp_path):
    shell: Any = Shell(place)
    stale = place.folder / "nodes" / "north.id"
    stale.write_text("123")
    first = admission.admit(place, shell)
    assert sorted(first) == let_in(place) == ["east", "north", "south"]
    assert not stale.exists()
    assert [one.name for one in admission.read_seats(place.seats) or ()] == ["north", "south", "east"]
    shell.said.clear()
    assert admission.admit(place, shell) == first
    assert shell.said == [], "who is in stays in"
    # Gone, exchanged, and back again with another key.
    south, north = place.folder / "nodes" / "south.pub", place.folder / "nodes" / "north.pub"
    kept = south.read_bytes()
    south.unlink()
    make_node_key(tmp_path / "new.key")
    north.write_bytes(public_half(tmp_path / "new.key").read_bytes())
    second = admission.admit(place, shell)
    assert sorted(second) == let_in(place) == ["east", "north"]
    assert second["north"] != first["north"]
    seats = admission.read_seats(place.seats) or ()
    assert [(seat.name, bool(seat.identity)) for seat in seats] == [("north", True), ("south", False), ("east", True)]
    assert seats[0].identity == identity_of(admission.public_key(north))
    south.write_bytes(kept)
    before = place.database.read_bytes(), place.seats.read_bytes()
    with pytest.raises(SpecError, match=r"south\.pub is a key that was removed .* makes a new key pair"):
        admission.admit(place, shell)
    assert (place.database.read_bytes(), place.seats.read_bytes()) == before, "nothing was changed"
    make_node_key(tmp_path / "newer.key")
    south.write_bytes(public_half(tmp_path / "newer.key").read_bytes())
    assert sorted(admission.admit(place, shell)) == let_in(place) == ["east", "north", "south"]


def test_a_key_stays_with_its_name_and_a_removed_one_is_refused_before_it_is_stored(place, tmp_path):
    shell: Any = Shell(place)
    admission.admit(place, shell)
    nodes = place.folder / "nodes"
    shell.said.clear()
    (nodes / "south.pub").rename(nodes / "west.pub")
    with pytest.raises(SpecError, match=r"west\.pub is registered as 'south'; keep that name"):
        admission.admit(place, shell)
    assert shell.said == [], "its registration is not lost"
    (nodes / "west.pub").rename(tmp_path / "south.pub")
    admission.admit(place, shell)
    with pytest.raises(SpecError, match="was removed from this federation"):
        add(place, "south", tmp_path / "south.pub")
    assert not (nodes / "south.pub").exists()
    with pytest.raises(SpecError, match="was removed from this federation"):
        replace_key(place, "north", tmp_path / "south.pub")
    assert sorted(file.stem for file in place.node_keys) == ["east", "north"]


def test_without_a_list_of_clients_a_node_keeps_its_number_all_the_same(place):
    file = place.folder / "server.toml"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith("clients")))
    place = ServerPlace.read(place.folder)
    shell: Any = Shell(place)
    for removed in ("", "east", "north"):
        if removed:
            (place.folder / "nodes" / f"{removed}.pub").unlink()
        admission.admit(place, shell)
        assert [seat.name for seat in admission.read_seats(place.seats) or ()] == ["east", "north", "south"]


def test_what_is_no_key_and_a_key_of_two_nodes_are_named(place):
    nodes = place.folder / "nodes"
    (nodes / "west.pub").write_bytes((nodes / "north.pub").read_bytes())
    with pytest.raises(SpecError, match=r"west\.pub is also the key of 'north'"):
        admission.keys(place)
    (nodes / "west.pub").write_text("no key")
    with pytest.raises(SpecError, match=r"west\.pub is not a public key .*node\.key\.pub"):
        admission.keys(place)
    (place.folder / "server.toml").write_text('host = "127.0.0.1"\nport = 1\nclients = ["a", "a"]\n')
    with pytest.raises(SpecError, match="'clients' is not a list of different names"):
        ServerPlace.read(place.folder)


def test_seats_come_from_the_server_and_a_broken_file_lets_nobody_in(tmp_path, monkeypatch):
    monkeypatch.delenv(SEATS, raising=False)
    assert admission.read_seats() is None, "a server that is not fedalloy's"
    monkeypatch.setenv(SEATS, str(tmp_path / "seats.json"))
    assert admission.read_seats() == ()
    (tmp_path / "seats.json").write_text(json.dumps([{"name": "north", "key": "key a"}]))
    assert admission.read_seats() == (Seat("north", "key a"),)
    (tmp_path / "seats.json").write_text("[1]")
    with pytest.raises(SpecError, match="writes it again"):
        admission.read_seats()


def test_who_is_online_is_read_in_flowers_database_without_starting_a_program(tmp_path, monkeypatch):
    """Flower's commands take seconds of a core, and this is asked again and again while a federation starts."""
    monkeypatch.setattr(FlwrCli, "ask", lambda *_: pytest.fail("a program was started"))
    names = ("west", "north", "eastern")
    write_federation(tmp_path / "fed", FederationPlan(names))
    local = LocalFederation.of(tmp_path / "fed")
    records = Records(local.server)
    for name, state, until in (("west", "online", 1e6), ("north", "online", -5.0), ("eastern", "offline", 1e6)):
        records.node(name, state, until)
    local.node_ids = {one.name: one.number for one in entries(local.server)}
    assert [name for name in names if local._online((name,))] == ["west"], "north was silent for too long"
    assert not local._online(names)
    assert local._status("eastern") == "offline"
