"The tour of every system, for the chapter on it (`make record-tour`)"
from pathlib import Path

from specref.app.tour import tour_record
from specref.core.check import write_record

if __name__ == "__main__":
    write_record(Path(__file__).with_suffix(".json"), "make record-tour", tour_record(every=True))
