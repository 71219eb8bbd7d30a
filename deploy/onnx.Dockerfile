# docker build -f deploy/onnx.Dockerfile --build-context model=data/06_models/export/onnx \
#   -t served deploy && docker run -p 127.0.0.1:8000:8000 served
FROM python:3.11-slim
# Without this variable, ONNX Runtime sends telemetry to Microsoft.
ENV ORT_DISABLE_TELEMETRY=1
RUN pip install --no-cache-dir onnxruntime transformers scipy
COPY onnx_server.py /
COPY --from=model . /model/
USER nobody
# The first process of a container ends only on signals that it handles, and Python
# handles SIGINT.
STOPSIGNAL SIGINT
CMD ["python", "/onnx_server.py", "/model", "8000", "0.0.0.0"]
