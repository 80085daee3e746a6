"""An operator's day with real processes, by commands alone: the long form is ``make test-long``."""

from __future__ import annotations

import os
import re
import signal

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.operations import front_answers
from fedalloy.flower.programs import wait_until
from tests.flower.day import LIMIT, Day, day
from tests.flower.test_real import listening_on

pytestmark = [pytest.mark.flower, pytest.mark.slow]
long = pytest.mark.skipif("FEDALLOY_LONG" not in os.environ, reason="takes minutes: make test-long")


def check_logs(one: Day) -> None:
    """No traceback in any log, and sites by their names."""
    for name, text in one.logs().items():
        assert "Traceback" not in text, f"{name}:\n{text}"
    who = re.findall(r"^round \d+/\d+: (.*), training loss", (one.run / "federation.log").read_text(), re.MULTILINE)
    assert who
    assert set(", ".join(who).split(", ")) <= set(one.sites)


def test_a_short_day(programs_find_us, tmp_path):
    """Two sites: start, helpers and a node that are killed, a new key, the end; then one site is revoked."""
    with day(tmp_path, ("north", "south"), 2, 3) as one:
        one.let(1)
        one.start_server()
        assert f"ready at 127.0.0.1:{one.port} for north, south\n" in one.said("server")
        place = ServerPlace.read(one.server)
        assert listening_on(place.link_port) == {"127.0.0.1"}
        one.start_nodes("north", "south")
        one.start_study()
        one.wait_round(1)
        one.wait_answered("south", 2)
        lock = one.server / "flwr" / "processes" / "flower-superexec.lock"
        helper = holder(lock)
        assert helper is not None
        (front,) = one.of_server(b"fedalloy.flower.front")
        os.kill(front, signal.SIGKILL)
        os.kill(helper, signal.SIGKILL)
        one.kill("south")
        wait_until(lambda: holder(lock) not in (None, helper), "there was another helper", LIMIT)
        wait_until(lambda: front_answers(place), "there was another front", LIMIT)
        one.rotate("south")
        one.start_nodes("south")
        shown = one.command("status", one.server, code=None)
        assert "north" in shown
        assert "south" in shown
        said = one.finish()
        assert "round 1/3: north, south" in said
        rows = list(read_run(one.run).rounds())
        assert [row["ids"] for row in rows] == [[0, 1]] * 3, "with its new key it has its seat"
        assert not any(row.get("lagging") for row in rows), "and its state"
        one.command("revoke", one.server, "south")
        unknown = "not let in yet: the server does not know this node's key"
        wait_until(
            lambda: unknown in one.said("south"), "the node that is out said why", LIMIT, [one.programs["south"]]
        )
        one.end()
        check_logs(one)


@long
def test_an_operators_day(programs_find_us, tmp_path):
    """Three sites; a node and the server die; a fourth site comes, one is revoked, one has a new key; the end."""
    with day(tmp_path, ("north", "south", "west"), 4, 9) as one:
        one.let(1)
        one.start_server()
        one.start_nodes("north", "south", "west")
        assert "north" in one.command("doctor", one.node("north"), one.recipe), "it is running, and ready"
        one.start_study()
        one.wait_round(1)

        one.wait_answered("west", 2)
        one.kill_helpers("west")
        one.kill("south")
        one.start_nodes("south")
        again = "flower-superexec of node west ended; it is started again"
        wait_until(lambda: again in one.said("west"), "its helper was missed", LIMIT, [one.programs["west"]])
        assert "not let in yet" not in one.said("south"), "a killed node is let in at once"
        one.let(3)
        one.wait_round(3)
        last = list(read_run(one.run).rounds())[-1]
        assert last["ids"] == [0, 1, 2], "the killed node is in again, and so is the one whose helpers were killed"

        one.command("backup", one.server, "-o", tmp_path / "backup.tar")
        one.kill_server()
        assert "the server is not running" in one.command("status", one.server, code=2)
        one.start_server()
        one.wait_connected("north", "south", "west")
        one.programs["study"].process.wait(LIMIT)
        one.start_study()
        one.let(5)
        one.wait_round(5)
        assert "continues (session 2)" in (one.run / "federation.log").read_text()

        one.admit("east", "west", 3)
        one.start_nodes("east")
        one.command("revoke", one.server, "west")
        one.rotate("south")
        one.let(7)
        one.wait_round(7)
        last = list(read_run(one.run).rounds())[-1]
        assert last["ids"] == [0, 1, 3], f"east is in, west is out, south has a new key: {last}"
        shown = one.command("status", one.server, code=None)
        assert all(name in shown for name in ("north", "south", "east"))
        assert "west" in one.command("logs", one.run, "west")
        assert "paused" in one.command("pause", one.server, "--wait", "0")
        assert one.programs["study"].process.wait(LIMIT) == 1
        assert "resumed as" in one.command("resume", one.server)
        one.start_study()
        follows = "of this study is"
        wait_until(lambda: follows in one.said("study"), "the same command follows it", LIMIT, [one.programs["study"]])
        said = one.finish()
        assert "round 9/9: north, south, east" in said
        assert re.search(r"west\s*│?\s*.*round [3-6]", said), "who is missing at the end, and since when"
        rows = list(read_run(one.run).rounds())
        assert [row["round"] for row in rows] == list(range(1, 10))
        assert "nothing was running" in one.command("stop", one.server)
        one.command("restore", tmp_path / "backup.tar", tmp_path / "restored")
        assert read_run(tmp_path / "restored" / "runs" / "study").last_round == 3
        one.end()
        check_logs(one)
