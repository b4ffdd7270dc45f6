"""Programs for developers that neither the library nor a release needs, started by hand.

Run each from the root of the repository, with `--help` for its options:

- `python -m tools.campaigns.fuzz`: bad and odd input to every entry point, of the tables in
  `fuzz_cases.py` or drawn by `fuzz_random.py`. Some minutes.
- `python -m tools.campaigns.damage`: flipped bits, cut and exchanged files in every kind of folder.
- `python -m tools.campaigns.kill`: trainings and evaluations that are killed and resumed, compared
  bit for bit. An hour on 2 cores.
- `python -m tools.campaigns.serve`: slow clients, signals and long prompts for a server.
- `python -m tools.campaigns.tokenizer_folders`: random tokenizer folders against `AutoTokenizer`.
- `python -m tools.campaigns.mutation`: changes of core modules that the tests should notice.
- `python tools/house.py`: lines, functions, guards, circles of imports and words in many files, of
  one checkout or of two, side by side.
- `python -m tools.ptx.emulate`: the compiled Hopper kernels on a CPU, against dense formulas.

The results of the campaigns are in `docs/reliability.md` and `docs/tests.md`. The programs use
modules next to the tests (`*_support.py`, oracles), which they import by path, because draccus
installs a package of the name `tests`.
"""
