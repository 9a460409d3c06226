"""The `vllm.general_plugins` entry point. vLLM calls it in every process, any number of times."""

NAME = "SplitZipConnector"


def register() -> None:
    """Make `"kv_connector": "SplitZipConnector"` known to vLLM, without importing it yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "vllm_splitzip.connector.facade", NAME)
