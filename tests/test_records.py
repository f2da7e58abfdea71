import pytest

from lssar.records import environment, write_csv, write_file, write_json


def test_nothing_is_overwritten_unasked(tmp_path):
    path = write_json(tmp_path / "a" / "x.json", {"a": 1})
    with pytest.raises(FileExistsError, match=r"x\.json exists"):
        write_json(path, {"a": 2})
    assert path.read_text() == '{\n "a": 1\n}\n'
    write_json(path, {"a": 2}, overwrite=True)
    assert '"a": 2' in path.read_text()


def test_a_failed_write_loses_nothing(tmp_path):
    path = write_json(tmp_path / "x.json", [1])

    def fails(temporary):
        temporary.write_text("half a fi")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_file(path, fails, overwrite=True)
    assert path.read_text() == "[\n 1\n]\n"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ValueError):  # NaN is not JSON
        write_json(path, float("nan"), overwrite=True)


def test_csv_has_every_column(tmp_path):
    path = write_csv(tmp_path / "x.csv", [{"a": 1}, {"a": 2, "b": 3}])
    assert path.read_text() == "a,b\n1,\n2,3\n"


def test_environment_names_machine_and_versions():
    record = environment()
    assert all(record[key] for key in ("date", "python", "torch", "cpu", "cores", "threads"))
