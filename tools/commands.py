"""Write docs/reference/commands.md: every command, its arguments and its exit codes, from the parser."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from markdown_links import escaped, sentence

from hookline.cli import CODES, make_parser
from hookline.config.load import TYPED

Command = tuple[str, argparse.ArgumentParser, str]
"""The full name of a command, its parser and its short help."""
WIDTH = 84
"""Characters of a line of code that the site shows without scrolling."""


def commands() -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    """Yield the full name, the parser and the short help of every command."""

    def walk(
        parser: argparse.ArgumentParser, above: str
    ) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {each.dest: each.help or "" for each in action._choices_actions}
                for name, below in action.choices.items():
                    yield f"{above} {name}", below, helps.get(name, "")
                    yield from walk(below, f"{above} {name}")

    yield from walk(make_parser(TYPED), "hookline")


def exit_codes(text: str) -> list[tuple[str, str]]:
    """Return the codes and their meaning from the end of a command's help."""
    said = " ".join(text.partition("exit codes: ")[2].split())
    parts = re.split(r"(?:^|, (?=\d))(\d+) ", said)[1:]
    found = list(zip(parts[::2], parts[1::2], strict=True))
    common = re.search(r"\s*\(all three (.*)\)", said)
    if common:  # what the help says of the codes of signals together
        found = [(code, re.sub(r"\s*\(all three .*\)", "", means)) for code, means in found]
        found = [(code, f"stopped {means}" if means.startswith("by SIG") else means) for code, means in found]
        found = [
            (code, f"{means}; it {common.group(1).replace('save and print', 'saves and prints')}")
            if code in ("130", "138", "143")
            else (code, means)
            for code, means in found
        ]
    return found


def arguments_table(parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments and options of a command as the rows of a table."""
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        flags = ", ".join(f"`{each}`" for each in action.option_strings) or f"`{action.metavar}`"
        choices = f" One of: {', '.join(map(str, action.choices))}." if action.choices else ""
        default = ""
        if action.default not in (None, False, "", [], argparse.SUPPRESS):
            default = f" Default: `{action.default}`."
        rows.append(f"| {flags} | {escaped(help_text(action) + choices + default)} |")
    return ["", "| argument | what it is |", "|---|---|", *rows] if rows else []


def help_text(action: argparse.Action) -> str:
    """Return the help of an argument as a sentence; formats and actions that it begins with are code."""
    said = (action.help or "").replace("%(prog)s", "hookline")
    said = re.sub(r"^([\w-]+(?:, [\w-]+)*): ", lambda found: f"{code_of(found.group(1))}: ", said)
    return sentence(with_options(said))


def with_options(text: str) -> str:
    """Return a text with its options as code."""
    return re.sub(r"(?<![`\w-])--[\w-]+(?:\.\w+)*(?:=\w+)?", lambda found: f"`{found.group()}`", text)


def code_of(words: str) -> str:
    """Return a list of words, each as code."""
    return ", ".join(f"`{word}`" for word in words.split(", "))


def below(epilog: str) -> list[str]:
    """Return what the help of a command says below its arguments; a table of it becomes a block."""
    out: list[str] = []
    for paragraph in epilog.partition("exit codes: ")[0].strip().split("\n\n"):
        lines = paragraph.splitlines()
        if any(line.startswith("  ") for line in lines):
            out += ["", "```", *lines, "```"]
        elif lines:
            out += ["", with_options(" ".join(lines))]
    return out


def usage_lines(usage: str) -> list[str]:
    """Return the usage of a command in short lines; an option stays with its value."""
    kept = re.sub(r"\[[^\]]*\]", lambda found: found.group().replace(" ", "\0"), usage)
    lines = textwrap.wrap(kept, WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def page() -> str:
    """Return the text of docs/reference/commands.md."""
    out = [
        "# Command line reference: commands and exit codes",
        "",
        "<!-- Generated from src/hookline/cli by tools/commands.py. -->",
        "",
        "Every command of `hookline`, its arguments and its exit codes. `hookline COMMAND --help` prints the "
        "same, and `hookline --version` the version.",
        "",
        "## Exit codes",
        "",
        "| exit code | what it means |",
        "|---|---|",
        *(f"| {code} | {sentence(means)} |" for code, means in exit_codes(CODES)),
        "",
        "Two more codes come from outside: 132 is a processor instruction that does not exist, and 137 is a "
        "process that the kernel killed because memory was full. [Troubleshooting](../troubleshooting.md) "
        "explains both.",
    ]
    for name, parser, about in commands():
        epilog = parser.epilog or ""
        lines = usage_lines(" ".join(parser.format_usage().split()).removeprefix("usage: "))
        out += ["", f"## {name}", "", sentence(about), "", "```", *lines, "```", *arguments_table(parser)]
        if epilog == CODES:
            out += ["", "Exit codes: [the table](#exit-codes)."]
            continue
        out += below(epilog)
        if codes := exit_codes(epilog):
            out += ["", f"Exit codes: {'; '.join(f'{code}: {means}' for code, means in codes)}."]
    return "\n".join(out) + "\n"
