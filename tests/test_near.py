"""What an error says of names near to a wrong one."""

from lcjax.errors import suggestion


def test_of_many_names_only_those_near_to_a_wrong_one_are_said():
    known = [f"task_{number}" for number in range(9)] + [f"other_{number}" for number in range(90)]
    said = suggestion("tsak_1", known)
    assert said.startswith("did you mean task_1? or task_") and said.endswith("; 99 are known")
    assert "other" not in said and "other_89" in suggestion("nothing like it", known)
