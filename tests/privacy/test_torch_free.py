"""Accounting, ledgers and guarantees can be read where torch is not installed."""

import subprocess
import sys

MODULES = ("accounting", "calibration", "guarantee", "ledger", "ledger_report", "membership_odds", "noise_planner")


def test_accounts_do_not_import_torch() -> None:
    imports = "; ".join(f"import sottovoce.privacy.{module}" for module in MODULES)
    code = f"import sys; sys.modules['torch'] = None; {imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
