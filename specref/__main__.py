"`python -m specref`: the command line of chapter 63"
from specref.app.commands import main

if __name__ == "__main__": main()
