import json
import math

import pytest
from typer.testing import CliRunner

from invariant_adam import reference
from invariant_adam_lab.cli import app
from invariant_adam_lab.verify import DELTAS, Claim, fit_order, verify


def run(*arguments):
    return CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize(("kappa", "against"), [(2, 3), (4, 6), (16, 4), (3, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_order_is_one(kappa, against, seed):
    claims = verify(kappa=kappa, against=against, seed=seed)
    assert {(c.theorem, c.rule, c.debiased, c.quantity) for c in claims} == {("SGD warm-up", "sgd", False, "w")} | {
        (theorem, rule, debiased, q)
        for theorem in ("Theorem 1", "Theorem 2")
        for rule in ("linear", "exponential")
        for debiased in (False, True)
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


def test_every_claim_is_a_measurement_of_its_own():
    claims = verify()
    assert len({tuple(c.differences) for c in claims}) == len(claims) == 25


def test_theorem_2_holds_two_batch_sizes_against_each_other_and_micro_adam_is_in_neither():
    """An algorithm that is wrong by the same amount at every batch size fails Theorem 1 alone."""

    def faster(s, grads, h):
        return reference.invariant_adam(s, grads, h._replace(lr=2 * h.lr))

    assert {claim.theorem for claim in verify(faster) if not claim.holds} == {"Theorem 1"}


def test_one_batch_size_has_no_other():
    with pytest.raises(ValueError, match="against must be at least 1 and not kappa, which is 4, got 4"):
        verify(against=4)
    result = run("--against", "4")
    assert result.exit_code == 2
    assert "--against must be at least 1 and not kappa, which is 4, got 4" in result.stderr


def test_the_tables_fit_80_columns():
    result = CliRunner().invoke(app, ["verify", "--kappa", "2"], env={"COLUMNS": "80"})
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout.replace("2⁻⁶ … 2⁻¹²", "")
    assert result.stdout.count("  holds") == 25
    assert "Theorem 2: invariant Adam at κ′ = 2 against invariant Adam at κ″ = 3" in result.stdout


def test_the_command_passes_with_invariant_adam():
    result = run()
    assert result.exit_code == 0, result.output
    assert "All 25 claims hold." in result.output
    assert "δ = 2⁻⁶ … 2⁻¹²" in result.output


def test_the_command_fails_with_standard_adam():
    result = run("--algorithm", "standard")
    assert result.exit_code == 1
    assert "8 of 25 claims fail." in result.output


def test_json_is_all_of_stdout():
    result = run("--json", "--kappa", "2", "--seed", "3")
    told = json.loads(result.stdout)
    assert (told["kappa"], told["seed"], told["passed"], len(told["claims"])) == (2, 3, True, 25)
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
    assert not Claim("", "", False, "v", [], fit_order(DELTAS, [math.nan] * 12)).holds
    assert not Claim("", "", False, "v", [], fit_order(DELTAS, [math.inf] * 12)).holds
    assert Claim("", "", False, "v", [], fit_order(DELTAS, [0.0] * 12)).holds
