"""Four made-up hospitals as files, with words, gaps, a level that some lack, an outcome and survival times."""

import numpy as np
import polars as pl

SIZES = {"basel": 120, "bern": 80, "chur": 60, "zug": 40}


def write_hospitals(folder):
    rng = np.random.default_rng(0)
    folder.mkdir()
    for k, (name, n) in enumerate(SIZES.items()):
        age, sex = rng.normal(60 + 3 * k, 10, n), rng.choice(["f", "m"], n)
        score = 0.05 * (age - 60) + 0.8 * (sex == "m") - 0.3
        pressure = [None if rng.random() < 0.1 else float(v) for v in rng.normal(130, 15, n)]
        time, censored = rng.exponential(10 * np.exp(-score)), rng.exponential(15, n)
        columns = {
            "age": age,
            "sex": sex,
            "ecg": rng.choice(["a", "b", "c"][: 2 + (k > 0)], n),
            "pressure": pressure,
            "outcome": np.where(rng.random(n) < 1 / (1 + np.exp(-score)), "sick", "healthy"),
            "time": np.minimum(time, censored),
            "event": (time <= censored).astype(int),
        }
        pl.DataFrame(columns).write_csv(folder / f"{name}.csv")
    return folder
