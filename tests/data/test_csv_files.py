"""LIBSVM and CSV files of the user's own."""

import pytest
import torch
from public_data import needs

from fednmap.data import DATASETS, load


def write(path, text):
    path.write_text(text)
    return path


def test_a9a_has_the_published_counts_and_balance():
    needs("libsvm", "a9a")
    data = load("svm:libsvm/a9a", test="libsvm/a9a.t")
    assert data.x_train.shape == (32_561, 123)
    assert data.x_test.shape == (16_281, 123)
    assert data.y_train.bincount().tolist() == [24_720, 7_841]
    assert data.y_test.bincount().tolist() == [12_435, 3_846]
    first = (data.x_train.to_dense()[0].nonzero().squeeze(1) + 1).tolist()
    assert first == [3, 11, 14, 19, 39, 42, 55, 64, 67, 73, 75, 76, 80, 83]


def test_svm_labels_and_features(tmp_path):
    train = write(tmp_path / "train", "-1 1:0.5 3:2\n+1 2:1\n-1\n")
    test = write(tmp_path / "test", "+1 5:1\n")
    data = load(f"svm:{train}", test=str(test))
    assert data.x_train.to_dense().tolist() == [[0.5, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert data.y_train.tolist() == [0, 1, 0]
    assert data.x_test.to_dense().tolist() == [[0, 0, 0, 0, 1]]
    assert data.y_test.tolist() == [1]
    assert load(f"svm:{train}", test=str(test), regression=True).y_train.tolist() == [-1, 1, -1]


def test_svm_with_fractions_is_a_regression(tmp_path):
    data = load(f"svm:{write(tmp_path / 'a', '0.5 1:1' + chr(10) + '2 1:3' + chr(10))}")
    assert data.classes is None
    assert data.y_train.tolist() == [0.5, 2]


def test_svm_that_counts_from_zero(tmp_path):
    data = load(f"svm:{write(tmp_path / 'a', '1 0:7 1:1' + chr(10) + '2 1:3' + chr(10))}")
    assert data.x_train.to_dense().tolist() == [[7, 1], [0, 3]]


def test_svm_counts_from_zero_in_both_files_if_it_does_in_one(tmp_path):
    train, test = write(tmp_path / "train", "1 0:7 1:1\n2 2:3\n"), write(tmp_path / "test", "1 1:5\n2 2:9\n")
    data = load(f"svm:{train}", test=str(test))
    assert data.x_test.to_dense().tolist() == [[0, 5, 0], [0, 0, 9]]
    assert load(f"svm:{test}", test=str(train)).x_train.to_dense().tolist() == [[0, 5, 0], [0, 0, 9]]


def test_svm_labels_keep_their_names(tmp_path):
    data = load(f"svm:{write(tmp_path / 'a', '3 1:1' + chr(10) + '-1 1:2' + chr(10) + '10 1:3' + chr(10))}")
    assert data.labels == ("-1", "3", "10")
    assert data.y_train.tolist() == [1, 0, 2]


@pytest.mark.parametrize("text", ["", "1 2:3\n1 2:", "a,b\n1,2\n", "1 2:x\n", "1 3:1 2:1\n", "\x00\x01\x02"])
def test_damaged_svm_is_refused_by_name(text, tmp_path):
    path = write(tmp_path / "damaged", text)
    with pytest.raises(ValueError, match="damaged") as error:
        load(f"svm:{path}")
    assert "\n" not in str(error.value)


def test_label_that_only_the_test_file_has_is_refused(tmp_path):
    train, test = write(tmp_path / "train", "1 1:1\n2 1:2\n"), write(tmp_path / "test", "3 1:1\n")
    with pytest.raises(ValueError, match="test has the label 3"):
        load(f"svm:{train}", test=str(test))


TABLE = "a,client,label,b\n1,x,yes,2\n3,y,no,4\n5,x,no,6\n"


def test_csv_finds_its_columns(tmp_path):
    data = load(f"csv:{write(tmp_path / 't.csv', TABLE)}")
    assert data.x_train.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.y_train.tolist() == [1, 0, 0]
    assert data.clients.tolist() == [0, 1, 0]


def test_csv_takes_named_columns(tmp_path):
    path = write(tmp_path / "t.csv", "hospital,b,a\n10,1,0.5\n2,2,1\n10,3,2\n")
    data = load(f"csv:{path}", target="b", client="hospital")
    assert data.x_train.squeeze(1).tolist() == [0.5, 1, 2]
    assert data.y_train.tolist() == [0, 1, 2]
    assert data.clients.tolist() == [1, 0, 1]  # hospital 2 comes before hospital 10
    assert load(f"csv:{path}", regression=True, target="b").y_train.tolist() == [1, 2, 3]


def test_options_may_follow_the_path(tmp_path):
    path = write(tmp_path / "a,b.csv", "hospital,b,a\n10,1,5\n2,2,1\n10,3,2\n")
    data = load(f"csv:{path},target=b,client=hospital,regression=true")
    assert data.y_train.tolist() == [1, 2, 3]
    assert data.y_train.is_floating_point()
    assert data.clients.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="no option 'labels'"):
        load(f"csv:{path},labels=b")


def test_csv_predicts_the_last_column_unless_told(tmp_path):
    data = load(f"csv:{write(tmp_path / 't.csv', 'a,b,client' + chr(10) + '1,0.5,3' + chr(10))}")
    assert data.y_train.tolist() == [0.5]


def test_csv_with_a_test_file(tmp_path):
    train = write(tmp_path / "t.csv", TABLE)
    test = write(tmp_path / "u.csv", "a,client,label,b\n7,y,yes,8\n")
    data = load(f"csv:{train}", test=str(test))
    assert data.x_test.tolist() == [[7, 8]]
    assert data.y_test.tolist() == [1]
    assert data.test_clients.tolist() == [1]
    other = write(tmp_path / "v.csv", "c,label,b\n7,yes,8\n")
    with pytest.raises(ValueError, match=r"v\.csv has the columns"):
        load(f"csv:{train}", test=str(other))


def test_every_client_gives_every_fifth_row_for_the_test(tmp_path):
    rows = "".join(f"{i},{i % 2},{i % 3}\n" for i in range(20))
    data = load(f"csv:{write(tmp_path / 't.csv', 'a,client,y' + chr(10) + rows)}")
    assert data.x_test.squeeze(1).tolist() == [8, 9, 18, 19]
    assert data.clients.bincount().tolist() == [8, 8]
    assert data.test_clients.bincount().tolist() == [2, 2]


def test_a_label_that_only_test_rows_have_is_one_of_the_labels(tmp_path):
    rows = "".join(f"{i},{'c' if i == 4 else 'ab'[i % 2]}\n" for i in range(10))
    data = load(f"csv:{write(tmp_path / 't.csv', 'v,y' + chr(10) + rows)}")
    assert data.y_test.tolist() == [2, 1]
    assert data.y_train.max() == 1
    assert data.classes == len(data.labels) == 3


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "must name the columns"),
        ("y,a,y\n1,2,1\n0,3,0\n", "two columns called 'y'"),
        ("a,y\n", "needs a header"),
        ("1,2\n3,4\n", "must name the columns"),
        ("a,y\n1,2\n3\n", "row 2: 1 values for 2 columns"),
        ("a,y\n1,2\n?,2\n", r"row 2: '\?' in column 'a'"),
        ("a,y\nnan,2\n", "row 1: 'nan' in column 'a'"),
        ("a,y\n1,\n", "row 1: no value in column 'y'"),
        ('a,y\n"1,2', "not a CSV file"),
    ],
)
def test_damaged_csv_is_refused_by_name(text, what, tmp_path):
    with pytest.raises(ValueError, match=what) as error:
        load(f"csv:{write(tmp_path / 'damaged.csv', text)}")
    assert "damaged.csv" in str(error.value)
    assert "\n" not in str(error.value)


def test_binary_file_is_no_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"a\.csv is not a CSV"):
        load(f"csv:{tmp_path / 'a.csv'}")


@pytest.mark.parametrize(
    ("spec", "options", "what"),
    [
        ("mnits", {}, "did you mean 'mnist'"),
        ("digits:3", {}, "takes nothing after a colon"),
        ("digits", {"test": "x"}, "no option 'test'; it has none"),
        ("synthetic:1", {}, "two numbers"),
        ("synthetic:-1,0", {}, "at least 0"),
        ("svm", {}, "no file given"),
        ("csv:absent.csv", {}, "no file absent.csv"),
        ("csv:absent.csv", {"path": "x"}, "no option 'path'; it has test, target"),
        ("sparse-regression", {"support": 300}, "between 0 and the number of features, 200"),
        ("sparse-regression", {"clients": 0}, "clients is 0"),
    ],
)
def test_what_cannot_be_loaded_is_explained(spec, options, what):
    with pytest.raises(ValueError, match=what):
        load(spec, **options)


def test_every_data_set_has_a_line_for_the_list():
    for name, make in DATASETS.items():
        assert make.__doc__, name
        assert len(make.__doc__.splitlines()[0]) > 20, name


def test_features_are_float32_and_labels_int64():
    for name in ("digits", "synthetic", "sparse-regression"):
        data = load(name)
        assert data.x_train.dtype == torch.float32
        assert data.y_train.dtype == (torch.float32 if data.classes is None else torch.int64)
