"""An HTTP server for an ONNX model that needs neither flatout nor torch.

    python onnx_server.py data/06_models/export/onnx 8000 [address]
    curl -d '{"texts": ["a text", "another"]}' http://127.0.0.1:8000/

Models of two texts need {"texts": [...], "pairs": [...]}. Samples of numbers or
pixels need {"inputs": [...]}; a table's row may be an object of values by column
name. The answer is a list with one object for each row.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from scipy.special import expit, softmax

# Otherwise ONNX Runtime would send usage data to Microsoft.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251
import onnxruntime

MOST_BYTES = 2**24


class Model:
    def __init__(self, folder: str) -> None:
        self.about = json.loads(Path(folder, "export.json").read_text())
        self.session = onnxruntime.InferenceSession(Path(folder, "model.onnx"))
        if "input_ids" in self.about["inputs"]:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def predict(self, asked: dict) -> list:
        about, (output,) = self.about, self.session.run(None, self._inputs(asked))
        if about["kind"] == "numbers":
            return [{"value": row} for row in output.tolist()]
        if about["kind"] == "scores":
            return [{"score": score} for score in expit(output[:, 0]).tolist()]
        scaled = output / np.float32(about["temperature"])
        several, names = about["kind"] == "labels", np.array(about["labels"])
        shares = expit(scaled) if several else softmax(scaled, axis=-1)
        chosen = names[(shares - about["thresholds"]).argmax(-1)].tolist()
        if several:
            chosen = [names[row].tolist() for row in shares > about["thresholds"]]
        if shares.ndim == 3:  # tags of all tokens
            return [{"label": label} for label in chosen]
        columns = [f"probability_{name}" for name in names]
        rows = [dict(zip(columns, row, strict=True)) for row in shares.tolist()]
        return [{"label": n, **row} for n, row in zip(chosen, rows, strict=True)]

    def _inputs(self, asked: dict) -> dict:
        about = self.about
        if "texts" in asked:
            texts = (
                (asked["texts"], asked["pairs"])
                if "pairs" in asked
                else (asked["texts"],)
            )
            options = {"truncation": True, "max_length": about["max_length"]}
            rows = self.tokenizer(*texts, padding=True, return_tensors="np", **options)
            return {name: rows[name] for name in about["inputs"]}
        if "inputs" not in asked or len(about["inputs"]) > 1:
            raise ValueError(f"texts or inputs are needed, not {sorted(asked)}")
        (name, kind), rows = *about["inputs"].items(), asked["inputs"]
        if rows and isinstance(rows[0], dict):
            rows = [[row[column] for column in about["columns"]] for row in rows]
        given = np.array(rows)
        if name == "pixel_values":
            mean, deviation = np.array(about["statistics"])
            given = ((given - mean) / deviation).transpose(0, 3, 1, 2)
        return {name: given.astype(kind)}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        try:
            size = min(int(self.headers["Content-Length"]), MOST_BYTES)
            status, found = 200, MODEL.predict(json.loads(self.rfile.read(size)))
        except Exception as error:  # the request is invalid
            status, found = 400, {"error": f"{type(error).__name__}: {error}"}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())


if __name__ == "__main__":
    MODEL = Model(sys.argv[1])
    host = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1"
    ThreadingHTTPServer((host, int(sys.argv[2])), Handler).serve_forever()
