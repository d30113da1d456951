"""`python -m tests.moejax.sixteen_devices CASE`: one case of `test_executor` that needs more devices than the tests have."""

import sys

import jax

from tests.moejax.test_executor import SIXTEEN, check


def main(name: str) -> None:
    """Checks the case of that name against the model without a pipeline."""
    (case,) = (case for case in SIXTEEN if str(case) == name)
    check(case)
    print(f"{case}: {jax.device_count()} devices, as without a pipeline")


if __name__ == "__main__":
    main(sys.argv[1])
