"`python -m specref tour | train | bench`"
import argparse
from importlib import import_module

COMMANDS = {"tour": ("tour", "decode with every system and print the table"), "train": ("training", "train the embedded models"),
            "bench": ("benchmarks", "measure speeds against their baselines")}   # command -> chapter, help


def main():
    "Run the function of the command's name in its chapter"
    parser = argparse.ArgumentParser(prog="specref", description="Speculative decoding: every way derived, run, and checked against its law")
    sub = parser.add_subparsers(dest="command", required=True)
    for name, (_, does) in COMMANDS.items(): sub.add_parser(name, help=does).add_argument("--out", help="where to write", default=argparse.SUPPRESS)
    args = vars(parser.parse_args())
    command = args.pop("command")
    getattr(import_module(f"specref.{COMMANDS[command][0]}"), command)(**args)


if __name__ == "__main__": main()
