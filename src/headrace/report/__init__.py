"""An analysis document (version 1, see headrace.traces.document) as text, CSV or one HTML file."""

from headrace.report.csv_tables import write_csv
from headrace.report.text import print_report

__all__ = ["print_report", "write_csv"]
