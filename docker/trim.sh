# Makes /opt/brayx smaller: `sh trim.sh tests` removes what nothing runs, `sh trim.sh serve` what only training runs.
set -eu
cd /opt/brayx/lib/python3.*/site-packages

case $1 in
tests)
    rm -rf torch/test torch/bin/test_* torch/bin/*StoreTest torch/bin/protoc* torch/lib/*test*.so onnx/backend/test ray/jars
    rm -rf torch/lib/libaoti_custom_ops.so torch/lib/libbackend_with_compiler.so sqlalchemy/testing torchgen/packaged
    # Python's module has all of ONNX Runtime; its C library is for other programs.
    rm -f onnxruntime/capi/libonnxruntime.so.*
    # What the console does not use of NiceGUI.
    rm -f nicegui/static/sass.dart.js
    for element in aggrid codemirror json_editor mermaid plotly scene; do rm -rf "nicegui/elements/$element/dist"; done
    find . -type d -name tests -prune -exec rm -rf {} +
    # Symbols for debuggers. Libraries that auditwheel put into *.libs do not load after strip.
    find . -path '*.libs' -prune -o -type f -size +50k -print | while read -r file; do
        if [ "$(head -c 4 "$file" | tail -c 3 | tr -d '\0')" = ELF ]; then strip --strip-unneeded "$file"; fi
    done
    ;;
serve)
    # matplotlib draws a trial's curves, scikit-learn and all from docker on are MLflow's and its server's, the rest are
    # Ray's tools for developers.
    # MLflow's page, RLlib, Arrow Flight and the like are parts of packages that serving needs. Arrow's libraries are
    # there thrice.
    /opt/brayx/bin/python -c "import sys, importlib.metadata as installed
for name in sys.argv[1:]:
    for file in installed.files(name) or ():
        file.locate().unlink(missing_ok=True)" \
        matplotlib contourpy fonttools kiwisolver scikit-learn scipy skops joblib virtualenv distlib py-spy pip \
        docker flask flask-cors graphene graphql-core graphql-relay gunicorn huey werkzeug
    rm -rf scipy.libs scikit_learn.libs torch/include mlflow/server/js ray/rllib ray/llm numpy/f2py onnxruntime/transformers
    rm -rf pyarrow/include pyarrow/*flight* pyarrow/*cpp_tests* pyarrow/libarrow_python*.so pyarrow/libarrow_python*.so.*.*.*
    find . \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.map' \) -delete
    find . -type d -empty -delete
    ;;
esac
