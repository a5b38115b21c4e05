from __future__ import annotations

import io

from pipeline.narration import Narration

LINES = """Stage 'config' didn't change, skipping
Running stage 'rollout@tiny-tp2-s0002':
> python -m stages.rollout tiny-tp2 --iteration 2
rollout: 100 %  16 of 16  1.0 s
Updating lock file 'dvc.lock'

Stage 'validate@tiny-tp2' is cached - skipping run, checking out outputs
Running stage 'validate@tiny-cp2':
> python -m stages.validate tiny-cp2
ERROR: failed to reproduce 'validate@tiny-cp2'
To track the changes with git, run:

	git add dvc.lock
Use `dvc push` to send your updates to remote storage.
""".splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def narrate(stream: io.StringIO, lines: list[str], fails: bool = False) -> Narration:
    narration = Narration("tiny", ["tiny-tp2", "tiny-cp2"], 6, stream)
    try:
        with narration:
            for line in lines:
                narration.hear(line)
            if fails:
                raise RuntimeError
    except RuntimeError:
        pass
    return narration


def test_without_a_terminal_a_finished_run_is_a_line_and_stages_speak_for_themselves():
    stream = io.StringIO()
    assert narrate(stream, LINES, fails=True).done == ["tiny-tp2"], "the run whose stage failed is not done"
    said = [line.rsplit("  ", 1)[0] for line in stream.getvalue().splitlines()]
    assert said == ["rollout: 100 %  16 of 16", "tiny-tp2: run 1 of 2 done", "ERROR: failed to reproduce 'validate@tiny-cp2'"]


def test_a_run_is_done_when_the_next_stage_begins_or_all_is_done():
    assert narrate(io.StringIO(), LINES[:7]).done == ["tiny-tp2"]
    assert narrate(io.StringIO(), LINES[:7], fails=True).done == []
    assert narrate(io.StringIO(), LINES[:9]).done == ["tiny-tp2", "tiny-cp2"]


def test_a_terminal_shows_run_stage_and_iteration():
    stream = Terminal()
    narration = Narration("tiny", ["tiny-tp2", "tiny-cp2"], 6, stream)
    with narration:
        for line in LINES[:4]:
            narration.hear(line)
        assert narration._bar.tasks[0].description == "tiny: run 1 of 2, tp2, rollout of iteration 2"
        assert (narration._bar.tasks[0].completed, narration._bar.tasks[0].total) == (1, 6)
    assert "rollout: 100 %" in stream.getvalue() and "> python" not in stream.getvalue()
