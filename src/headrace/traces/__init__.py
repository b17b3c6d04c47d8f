"""Traces in, verdicts out: where the step's time goes, which rank or link is slow and why, or that none is.

    from headrace.traces import analyze, to_document
    document = to_document(analyze([Path("traces")]))
    document["slow_rank"]["what"]

Reads PyTorch (Kineto) traces, Ascend text and database exports, merged cluster tables, tables of operations, records
of `headrace.measure`, training logs. Imports neither torch nor anything of the feed.
"""

from headrace.traces.analysis import Analysis, analyze, judge
from headrace.traces.document import VERSION, to_document
from headrace.traces.groups import parse_groups
from headrace.traces.timeline import Group, RankTrace

__all__ = ["VERSION", "Analysis", "Group", "RankTrace", "analyze", "judge", "parse_groups", "to_document"]
