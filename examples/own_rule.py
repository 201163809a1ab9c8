"""Your own quality rule: `python examples/own_rule.py FOLDER OUT`."""

from __future__ import annotations

import sys

from bmforge.data import DocumentStage, PrepareConfig, prepare
from bmforge.data.clean import Bounds, Rule, RuleFilter, RuleSet, TextStatistics


def shout(text: TextStatistics) -> float:
    """Return the number of exclamation marks in a text."""
    return text.text.count("!")


# Increase the version of the set when a rule changes: resuming checks it.
MINE = RuleSet("mine", 1, (Rule("shouts", shout, Bounds(high=3)),))

if __name__ == "__main__":  # worker processes import this file as well
    judge = RuleFilter("none", (MINE,))
    steps = [DocumentStage("mine", judge, judge.version)]
    config = PrepareConfig(vocab_size=512, workers=2, skip_bad=True)
    report = prepare(sys.argv[1], sys.argv[2], config, steps=steps)
    for rule, amount in report.funnel.dropped.items():
        print(f"dropped by {rule}: {amount.documents} documents")
