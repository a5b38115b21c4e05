"""User faults: one line that names key, value and remedy. They end a command with their exit code and without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A value that cannot work. The message is one line: key, value, remedy."""

    exit_code = 2


class LayoutError(UserError):
    """A layout that the model or the samples can't have: a sweep over degrees leaves it out."""


class ResultsDiffer(UserError):
    """The runs of an experiment did not end in the same bits."""

    exit_code = 3


class MissingPrerequisite(UserError):
    """Something outside the configuration is absent: a compiler, a package, a file of an earlier stage."""

    exit_code = 4
