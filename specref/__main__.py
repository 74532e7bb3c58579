"`python -m specref tour | train | bench`"
import argparse


def main():
    "Run one of the library's commands"
    parser = argparse.ArgumentParser(prog="specref", description="Speculative decoding: every way derived, run, and checked against its law")
    sub = parser.add_subparsers(dest="command", required=True)
    for name, does in dict(tour="decode with every system and print the table", train="train the embedded models", bench="measure speeds against their baselines").items():
        sub.add_parser(name, help=does).add_argument("--out", help="where to write", default=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    command = args.pop("command")
    if command == "tour": from specref.tour import tour as run
    if command == "train": from specref.training import train as run
    if command == "bench": from specref.benchmarks import bench as run
    run(**args)


if __name__ == "__main__": main()
