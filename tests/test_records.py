import pytest

from lssar.records import check_name, environment, read_json, remove_temporary, write_csv, write_file, write_json


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


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\\b", "a b"])
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(ValueError, match="expected letters"):
        check_name(name)
    check_name("gpt2-124m_v1.0")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "cut", "no text", "deep"])
def test_a_damaged_json_file_is_named(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"x\.json: expected a JSON object"):
        read_json(tmp_path / "x.json", dict)


def test_temporary_files_of_killed_writes_are_removed(tmp_path):
    """Also those of a hidden file, whose temporary names begin with two dots; others stay."""
    for name in (".x_progress.json", "..x_progress-ab12.json", ".x_progress-other.bin", ".config-ab12.json"):
        (tmp_path / name).write_text("{}")
    remove_temporary(tmp_path / ".x_progress.json")
    remove_temporary(tmp_path / "config.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x_progress-other.bin", ".x_progress.json"]
