"""sweep.py: the paper's tables against the scripts, the selection rule by hand, and real sweeps of tiny trials."""

import dataclasses
import importlib

import pytest

import sweep


def script_defaults(algorithm: str) -> dict:
    script, subcommand, _ = sweep.ALGORITHMS[algorithm]
    module = importlib.import_module(script.removesuffix(".py"))
    names = {"sac": "SACArgs", "sacfd": "SACfDArgs", "gail": "GAILArgs", "bc": "BCArgs", "mdn": "MDNArgs"}
    args = getattr(module, names[subcommand[0]] if subcommand else "Args")
    return {field.name: field.default for field in dataclasses.fields(args)}


@pytest.mark.parametrize("algorithm", sweep.TABLES)
def test_every_name_is_an_argument_and_every_bold_value_its_default(algorithm):
    defaults = script_defaults(algorithm)
    for name, choice in sweep.TABLES[algorithm].items():
        assert set(choice.bold) <= set(choice.values)
        assert len(set(choice.values)) == len(choice.values)
        for argument in choice.arguments or (name,):
            assert argument in defaults
            if choice.bold:
                same = defaults[argument] in choice.bold
                assert same != ((algorithm, name) in sweep.DIFFERENCES), f"{algorithm}: {argument}"
            else:
                assert defaults[argument] in choice.values  # the paper selects none: any that it tried


def test_the_tables_have_the_papers_size():
    sizes = {algorithm: len(table) for algorithm, table in sweep.TABLES.items()}
    assert sizes == {
        "aquadqn": 10,
        "sac": 4,
        "sacfd": 6,
        "aquagail": 17,
        "gail": 13,
        "bc": 8,
        "mdn": 5,
        "sac-robodesk": 4,
        "aquaplay": 4,
    }
    assert all(reason for reason in sweep.DIFFERENCES.values())
