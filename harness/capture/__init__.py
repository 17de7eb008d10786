"""The capture store: one engine's outputs over one panel, on disk, a Parquet file a row.

    with CaptureWriter(folder, identity, panel, head, "hidden", torch.bfloat16) as writer:
        for index in writer.missing_rows():
            ...
            writer.write_row(row, outputs, stats)
        writer.finish()
    capture = open_capture(folder, panel=panel)
    capture.row(0).states_TH

Heads lie beside the capture in ``folder.parent / "heads"``, by content.
"""

from harness.capture.heads import load_head, save_head
from harness.capture.manifest import CaptureKey, Manifest, RowEntry
from harness.capture.reader import Capture, CapturedRow, open_capture
from harness.capture.verify import verify_capture
from harness.capture.writer import CaptureWriter

__all__ = [
    "Capture",
    "CaptureKey",
    "CaptureWriter",
    "CapturedRow",
    "Manifest",
    "RowEntry",
    "load_head",
    "open_capture",
    "save_head",
    "verify_capture",
]
