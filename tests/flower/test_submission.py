"""Starting, following, continuing, stopping and pausing runs, with a Flower that answers from a list."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.cli.flower import _finish
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import Recipe, parse
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.stop import is_asked, request_of
from fedalloy.flower import flwr_cli
from fedalloy.flower.control import Control
from fedalloy.flower.flwr_cli import FlwrCli
from fedalloy.flower.layout import PAUSED, RUNNING, ServerPlace
from fedalloy.flower.programs import birth
from fedalloy.flower.progress import progress
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.server import SERVER_GONE
from fedalloy.flower.submission import Study
from fedalloy.flower.transport import RunEnded
from fedalloy.flower.trial import running_process, trial_of
from tests.flower.fake import FakeGrid, federation, play, recipe_file
from tests.flower.server_records import Records, a_run

pytestmark = pytest.mark.flower
RECIPE = parse({"partition": {"kind": "iid", "clients": 3}, "run": {"rounds": 10}})


class Server(Records):
    """Flower's records, and ``flwr`` for them: a run that is asked about is over when the list says how."""

    def __init__(self, place: ServerPlace) -> None:
        super().__init__(place)
        self.endings: dict[str, list[str]] = {}
        self.said: list[str] = []

    def ask(self, arguments: list[str]) -> dict[str, object]:
        self.said.append(arguments[0])
        if arguments[0] == "run":
            number = 100 + self.said.count("run")
            self.run(number, None)
            return {"run-id": str(number)}
        if arguments[0] == "list":
            left = self.endings.get(arguments[-3], ["finished:completed"])
            return {"runs": [{"status": left.pop(0) if len(left) > 1 else left[0]}]}
        self.end(int(arguments[1]), "stopped")
        return {}

    def flwr(self, environment: object) -> Server:
        return self

    def environment(self, home: Path) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


class Shell(FlwrCli):
    """Asks the server in this process."""

    def _run(self, arguments: list[str]) -> tuple[int, str]:
        server: Server = self.launcher  # type: ignore[assignment]
        return 0, json.dumps({"success": True, **server.ask(arguments)})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(flwr_cli, "ASK", 0.001)
    write_federation(tmp_path / "fed", FederationPlan(("north", "south", "west")))
    return Server(ServerPlace.read(tmp_path / "fed" / "server"))


def study(server: Server, folder: Path, recipe=RECIPE) -> Study:
    return Study(Shell(server.place, launcher=server), recipe, folder)  # type: ignore[arg-type]


def test_the_same_command_twice_follows_the_run_that_is_going_on(server, tmp_path):
    folder, said = tmp_path / "run", list[str]()
    assert study(server, folder).run_to_end(said.append) == "finished:completed"
    assert server.said.count("run") == 1
    server.run(7, folder)
    server.endings["7"] = ["running", "finished:completed"]
    assert study(server, folder).run_to_end(said.append) == "finished:completed"
    assert server.said.count("run") == 1, "no second one was started"
    assert said[-1] == "run 7 of this study is running; following it"
    with pytest.raises(CheckpointError, match=r"another recipe is running in .*run \(run 7\)"):
        study(server, folder, parse({"partition": {"kind": "iid", "clients": 4}})).run_to_end(said.append)


def test_a_session_that_is_lost_while_it_is_followed_is_continued(server, tmp_path):
    """As when the server was restarted, and has given up the run of before."""
    folder, said = a_run(tmp_path / "run"), list[str]()
    server.run(7, folder)
    server.endings["7"] = ["finished:failed"]
    assert study(server, folder).run_to_end(said.append) == "finished:completed"
    assert said[1:] == ["that session ended as finished:failed; the run is continued", "run 101 was started"]
    folder = a_run(tmp_path / "other", "failed")
    server.run(8, folder)
    server.endings["8"] = ["finished:failed"]
    assert study(server, folder).run_to_end(said.append) == "finished:failed", "it would fail again"


def test_what_a_run_would_refuse_is_refused_before_it_is_sent(server, tmp_path):
    wrong = parse({"partition": {"kind": "iid", "clients": 3}, "algorithm": {"name": "fedawg"}})
    with pytest.raises(SpecError, match="fedawg"):
        study(server, tmp_path / "run", wrong).run_to_end(print)
    assert server.said == []
    assert not (tmp_path / "run").exists()


def test_the_reason_of_an_error_is_in_the_log_that_the_message_names(tmp_path):
    recipe = recipe_file(tmp_path, "fedawg")
    with pytest.raises(SpecError):
        play(recipe, tmp_path / "run", federation(tmp_path))
    assert "ended with an error: " in (tmp_path / "run/federation.log").read_text()
    assert "fedawg" in (tmp_path / "run/federation.log").read_text()


class Ended(FakeGrid):
    """A server that has ended the run: it answers its app no longer."""

    def get_nodes(self) -> list[object]:
        if self.count > 6:
            request = httpx.Request("POST", "https://server/")
            raise httpx.HTTPStatusError("401", request=request, response=httpx.Response(401, request=request))
        return super().get_nodes()


def test_a_run_that_was_ended_at_the_server_did_not_fail(tmp_path):
    grid = Ended(federation(tmp_path).nodes)
    with pytest.raises(RunEnded, match="ended at the server"):
        play(recipe_file(tmp_path), tmp_path / "run", grid)
    status = read_run(tmp_path / "run").status
    assert status["state"] == "interrupted"
    assert status["reason"].startswith("the run was ended at the server")
    ending = play(recipe_file(tmp_path), tmp_path / "run", FakeGrid(grid.nodes))
    assert ending.status == "finished"


class Clock:
    """Time that passes when somebody sleeps; then what is planned happens."""

    def __init__(self, then) -> None:
        self.now, self.then = 0.0, then

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then(self.now)


def control(server: Server, said: list[str], then=lambda now: None) -> Control:
    clock = Clock(then)
    return Control(Shell(server.place, launcher=server), said.append, 60.0, clock, clock.sleep)  # type: ignore[arg-type]


def test_stop_asks_for_the_end_of_the_round_and_ends_only_what_does_not_end(server, tmp_path):
    good, bad = a_run(tmp_path / "good"), a_run(tmp_path / "bad")
    server.run(7, good)
    server.run(8, bad)
    server.run(9, None, over="completed")
    said: list[str] = []

    def ends(now: float) -> None:
        if now == 5.0:
            assert is_asked(request_of(good), (good / "lock").read_text().split()[1])
            server.end(7, "completed")

    with RunFolder.open(good).lock():
        assert sorted(control(server, said, ends).stop()) == ["7", "8"]
    assert said == ["run 8 did not end within 60 s; it is ended in the middle of a round"]
    assert server.said == ["stop"]


def test_what_was_paused_is_resumed_and_nothing_else(server, tmp_path):
    folder = tmp_path / "run"
    study(server, folder).start()
    server.run(7, folder)
    server.run(8, a_run(tmp_path / "other"), over="completed")
    assert control(server, [], lambda now: server.end(7, "completed")).pause() == ["7", "101"]
    assert (folder / PAUSED).exists()
    assert control(server, []).resume() == ["102"]
    assert not (folder / PAUSED).exists()
    server.end(102, "completed")
    assert control(server, []).resume() == []


def test_what_was_paused_and_is_continued_or_over_is_not_resumed(server, tmp_path):
    """'run' continues a paused study too; and the round in progress may have been the last one."""
    folder = tmp_path / "run"
    study(server, folder).start()
    server.run(7, folder)
    control(server, [], lambda now: [server.end(one, "completed") for one in (7, 101)]).pause()
    assert (folder / PAUSED).exists()
    study(server, folder).start()
    assert not (folder / PAUSED).exists()
    over = a_run(tmp_path / "over", "finished")
    (over / PAUSED).touch()
    server.run(9, over, over="completed")
    assert control(server, []).resume() == []


def test_a_run_that_was_stopped_is_not_called_finished(tmp_path, capsys):
    with pytest.raises(BaseException) as ended:  # noqa: PT011 (Typer's own)
        _finish("finished:completed", a_run(tmp_path / "run", "stopped"))
    assert getattr(ended.value, "exit_code", None) == 1
    assert "was stopped on request; the same command continues it" in capsys.readouterr().out


def test_up_of_a_study_that_is_running_follows_it(tmp_path):
    trial = trial_of(RECIPE, tmp_path / "run", None)
    trial.prepare()
    (tmp_path / "run/federation.log").write_text("old\n")
    log = tmp_path / "run/federation.log"
    code = f"import time; time.sleep(0.5); open({str(log)!r}, 'a').write('round 1/10\\n'); time.sleep(0.3)"
    other = subprocess.Popen([sys.executable, "-c", code])
    (tmp_path / "run/federation/server" / RUNNING).write_text(json.dumps({"pid": other.pid}))
    said: list[str] = []
    threading.Thread(target=other.wait).start()
    assert trial.run(said.append) == "finished:not begun"
    assert said == [f"process {other.pid} is running this already; following it", "round 1/10"]


@pytest.mark.parametrize("command", ["stop", "pause", "resume", "admit"])
def test_commands_to_a_server_that_does_not_run_say_so(command, tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    done = CliRunner().invoke(app, ["flower", command, str(tmp_path / "fed/server")])
    assert done.exit_code == 2
    assert "is not running" in done.output


def test_two_commands_at_once_start_one_session(server, tmp_path):
    """The second one follows what the first one has started, or names the other recipe."""
    folder, begun = tmp_path / "run", threading.Barrier(2)
    ask = server.ask

    def slow(arguments: list[str]) -> dict[str, object]:
        if arguments[0] != "run":
            return ask(arguments)
        time.sleep(0.2)  # as long as Flower needs; the other command looks meanwhile
        server.said.append("run")
        server.run(100 + server.said.count("run"), folder)
        return {"run-id": str(100 + server.said.count("run"))}

    server.ask = slow

    def start(recipe: Recipe) -> tuple[str, bool] | str:
        begun.wait(60)
        try:
            found, new = study(server, folder, recipe).begin(lambda text: None)
        except CheckpointError as error:
            return str(error)
        return found.id, new

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(start, [RECIPE, RECIPE])) == [("101", False), ("101", True)]
        server.end(101, "completed")
        other = parse({"partition": {"kind": "iid", "clients": 3}, "run": {"rounds": 11}})
        said = [one for one in pool.map(start, [RECIPE, other]) if isinstance(one, str)]
    assert len(said) == 1
    assert "another recipe is running" in said[0]
    assert server.said.count("run") == 2


def test_the_number_of_a_process_that_is_another_one_by_now_is_not_followed(tmp_path):
    """As after a power failure: whatever has the number of the one that ran the federation does not run it."""
    file = tmp_path / RUNNING
    for born, found in (("", os.getppid()), (birth(os.getppid()), os.getppid()), ("an earlier start 7", None)):
        file.write_text(json.dumps({"pid": os.getppid(), "born": born}))
        assert running_process(tmp_path) == (found if birth(1) else os.getppid())


def test_a_run_whose_server_is_gone_is_interrupted_and_was_not_stopped(tmp_path):
    """Flower sends its app a signal then. Nobody asked for it, so that monitoring must know."""

    def gone(text: str) -> None:
        if "round 1/3" in text:
            signal.raise_signal(signal.SIGINT)

    recipe, grid = recipe_file(tmp_path), federation(tmp_path)
    ending = play(recipe, tmp_path / "run", grid, say=gone)
    status = read_run(tmp_path / "run").status
    assert (ending.status, status["state"], status["reason"]) == ("interrupted", "interrupted", SERVER_GONE)
    assert progress(tmp_path / "run").round == 1
    assert f"interrupted after round 1: {SERVER_GONE}" in (tmp_path / "run/federation.log").read_text()
    assert play(recipe, tmp_path / "run", grid).status == "finished"


def test_what_an_operator_has_ended_is_not_continued_by_another_command(server, tmp_path):
    """With '--wait 0', in the middle of a round, while it is followed."""
    folder = a_run(tmp_path / "run")
    server.run(7, folder)
    server.endings["7"] = ["finished:stopped"]
    assert study(server, folder).run_to_end(lambda text: None) == "finished:stopped"
    assert "run" not in server.said


def test_ctrl_c_says_that_the_run_continues(server, tmp_path, monkeypatch):
    """It ends the command that follows it, and nothing else."""

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "run_to_end", interrupted)
    monkeypatch.setattr("fedalloy.flower.operations.answers", lambda place: True)
    recipe = recipe_file(tmp_path)
    done = CliRunner().invoke(
        app, ["flower", "run", str(server.place.folder), str(recipe), "-o", str(tmp_path / "run")]
    )
    assert (done.exit_code, "the run itself continues" in done.output) == (130, True)
