import json
import math

import pytest
from typer.testing import CliRunner

from invariant_adam import reference
from invariant_adam_lab.cli import app
from invariant_adam_lab.verify import DELTAS, Claim, fit_order, verify


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments])


@pytest.mark.parametrize("kappa", [2, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_order_is_one(kappa, seed):
    claims = verify(kappa=kappa, seed=seed)
    assert {(c.theorem, c.rule, c.quantity) for c in claims} == {("SGD", "sgd", "w")} | {
        (theorem, rule, q)
        for theorem in ("Theorem 1", "Theorem 2")
        for rule in ("linear", "exponential")
        for q in "mvw"
    }
    for claim in claims:
        assert claim.order == pytest.approx(1, abs=0.1), claim
        assert claim.holds


def test_standard_adam_in_its_place_fails_on_v_and_on_nothing_else():
    for claim in verify(reference.standard_adam):
        if claim.quantity == "v":
            assert claim.order == pytest.approx(0, abs=0.1)
            assert not claim.holds
        else:
            assert claim.holds


def test_invariant_adam_with_an_unscaled_learning_rate_fails_on_w():
    def unscaled(s, grads, h):
        return reference.invariant_adam(s, grads, h._replace(lr=h.lr / len(grads)))

    assert {claim.quantity for claim in verify(unscaled) if not claim.holds} == {"w"}


def test_the_two_theorems_are_two_measurements():
    by_theorem = {c.theorem: c.differences for c in verify() if (c.rule, c.quantity) == ("linear", "w")}
    assert by_theorem["Theorem 1"] != by_theorem["Theorem 2"]


def test_the_command_passes_with_invariant_adam():
    result = run()
    assert result.exit_code == 0, result.output
    assert "All 13 claims hold." in result.output
    assert "δ = 2⁻⁶ … 2⁻¹²" in result.output


def test_the_command_fails_with_standard_adam():
    result = run("--algorithm", "standard")
    assert result.exit_code == 1
    assert "4 of 13 claims fail." in result.output


def test_json_is_all_of_stdout():
    result = run("--json", "--kappa", "2", "--seed", "3")
    told = json.loads(result.stdout)
    assert (told["kappa"], told["seed"], told["passed"], len(told["claims"])) == (2, 3, True, 13)
    assert told["deltas"] == [2.0**-i for i in range(1, 13)]
    assert all(len(claim["differences"]) == 12 for claim in told["claims"])
    failed = run("--json", "--algorithm", "standard")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["passed"] is False


def test_one_micro_batch_has_nothing_to_compare():
    with pytest.raises(ValueError, match="kappa must be at least 2"):
        verify(kappa=1)
    assert run("--kappa", "1").exit_code == 2


@pytest.mark.parametrize("order", [0, 1, 2.5])
def test_the_fit_recovers_a_power(order):
    assert fit_order(DELTAS, [7 * delta**order for delta in DELTAS]) == pytest.approx(order, abs=1e-12)


def test_what_is_not_a_number_never_holds():
    assert not Claim("", "", "v", [], fit_order(DELTAS, [math.nan] * 12)).holds
    assert not Claim("", "", "v", [], fit_order(DELTAS, [math.inf] * 12)).holds
    assert Claim("", "", "v", [], fit_order(DELTAS, [0.0] * 12)).holds
