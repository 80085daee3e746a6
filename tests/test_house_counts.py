"""``scripts/house.py`` counts a small source right."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.house import House, described, look

BLOCK = "\n".join(f"    number_{row} = {row}" for row in range(10))


@pytest.fixture
def house(tmp_path: Path) -> House:
    files = {
        "low/tree.py": f'"""Low."""\n\n\nclass Leaf:\n    """One."""\n\n\ndef grow():\n{BLOCK}\n',
        "high/tree.py": f"class Leaf:\n    pass\n\nclass Tall:\n{BLOCK}\n\ndef up():\n    from toy.low import tree\n",
        "low/__init__.py": "from ..high import tree  # comes back\n",
        "edge/one.py": "import toy.high.tree\n",
    }
    for name, text in files.items():
        (tmp_path / "toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toy" / name).write_text(text)
    return look(tmp_path / "toy")


def test_files_lines_and_functions(house: House) -> None:
    assert (house.files, house.short_files, house.functions) == (4, 4, 2)
    assert house.code_lines == 1 + 12 + 15 + 1
    assert house.longest == [("low/tree.py:grow", 11), ("high/tree.py:up", 2)]
    assert house.median_length == 6.5


def test_names_cycles_and_repetitions(house: House) -> None:
    assert house.base_names == {"tree": 2}
    assert house.class_names == {"Leaf": ["high/tree.py", "low/tree.py"]}
    assert house.cycles == [["high", "low"]]
    assert len(house.duplicates) == 1
    assert "import cycles: high - low" in "\n".join(described(house))


def test_other_packages_can_be_counted(tmp_path: Path, house: House) -> None:
    together = {"toy.low": "all", "toy.high": "all"}
    assert look(tmp_path / "toy", together).cycles == []


def test_no_cycles_no_class_name_twice_nothing_written_twice() -> None:
    here = look(Path(__file__).resolve().parents[1] / "src" / "fedalloy")
    assert (here.cycles, here.class_names, here.duplicates) == ([], {}, [])
