"How often reports on right samplers fail, at two rates (`make record-false_alarms`, minutes)"
from pathlib import Path

from specref.certify.sampler_mutants import RIGHT_SAMPLERS
from specref.certify.samplers import count_false_alarms
from specref.core.check import write_record

if __name__ == "__main__":
    write_record(Path(__file__).with_suffix(".json"), "make record-false_alarms",
                 count_false_alarms(RIGHT_SAMPLERS))
