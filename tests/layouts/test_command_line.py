"""`python -m layouts`: a word it does not know, its exit codes, its help."""

import types

import pytest

from layouts import __main__ as command_line
from layouts.errors import InfeasibleError, InputError


@pytest.fixture
def command(monkeypatch):
    """A command `greet` of a module that is not on disk; returns that module."""
    module = types.ModuleType("layouts.commands.greet", "Greets.")
    module.configure = lambda parser: parser.add_argument("--times", type=int)
    module.run = lambda options: 0
    monkeypatch.setattr(command_line, "COMMANDS", {"greet": "greets"})
    monkeypatch.setattr(command_line.importlib, "import_module", {"layouts.commands.greet": module}.__getitem__)
    return module


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: command None: legal are greet\n"),
        (["greets"], "error: command 'greets': legal are greet (did you mean greet?)\n"),
        (["greet", "--times", "x"], "error: argument --times: invalid int value: 'x'\n"),
        (["greet", "--time-s"], "error: unrecognized arguments: --time-s\n"),
    ],
)
def test_words_it_does_not_know(command, capsys, words, message):
    assert command_line.main(words) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(("error", "code"), [(InputError, 2), (InfeasibleError, 3)])
def test_errors_are_one_line_and_a_code(command, capsys, error, code):
    def run(options):
        raise error("a\nb")

    command.run = run
    assert command_line.main(["greet"]) == code
    assert capsys.readouterr().err == "error: a b\n"


def test_the_command_gets_its_options(command):
    command.run = lambda options: options.times
    assert command_line.main(["greet", "--times", "7"]) == 7


@pytest.mark.parametrize("words", [["--help"], ["greet", "--help"]])
def test_help(command, capsys, words):
    with pytest.raises(SystemExit) as ended:
        command_line.main(words)
    assert ended.value.code == 0
    assert "greet" in capsys.readouterr().out
