"""The golden files are byte copies of what public implementations produced; nobody may edit them."""

from __future__ import annotations

import hashlib
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"

SHA256 = {
    "agentx/README.md": "66fb6bb28c5446d09088a3a82d67be6575e14e67b11cbe575da0e1c2f145a9ec",
    "agentx/make_traces.py": "2308c76d623035362d5cd3b2603e171d16063d7118642ce38d8a8b49514df253",
    "agentx/sample-run/profile_export.jsonl": "e039fd42bd220b153674f16440036b8a743976b979757c817d91979323b68a9d",
    "agentx/sample-run/profile_export_aiperf.csv": "3b3f6d87fb512c24fe95e76aa4f02daa1ad4454bbd405e9440f7df6ecffe1bbc",
    "agentx/sample-run/profile_export_aiperf.json": "cd083fbd58443abfd7eb41ea33014c4fc1275c974cc98db78d11bf4805a4712d",
    "agentx/sample-run/profile_export_aiperf_timeslices.json": "5bd70d5a3e59de22fa9f6cc3dbf8d2b0a57c0fb610091de5183f3627f4aeede0",
    "agentx/sample-run/server_metrics_export.json": "38e51abfb931b6a6a57f6a8420743aaaf1c1f5d1eae2b758239ebaa5d2a0ef91",
    "agentx/sample-run/server_metrics_export.parquet": "0decdfe5d42f1875b8c24b4659ffc922e84ab8aaf76079c6ca75f6255780d38a",
    "agentx/traces/syn-compaction.json": "e64ce09aabedf3d31f1db9e8c63c66b444d5ab862c1e42c8a4a054d47a0f76b2",
    "agentx/traces/syn-fan_out.json": "2e403f3548d75cb3f8e660f6d93df64713596780dfce537786742e86ebf3b6b2",
    "agentx/traces/syn-linear.json": "99f7c0da6340b5b40d1d343e90d276b01a6e344b9465c03c24c78b9c3368833a",
    "agentx/traces/syn-one_helper.json": "9b50bde1bc7635da2bae60fef267d981a2bbbbed19b2bb52dac79c8ea2ff9556",
    "agentx/traces/syn-side_model.json": "7b6dbfa811a03b7cdbf4fdee4146ad4f30eda3500b0024f4aa047a407a58d5c0",
    "encoding/README.md": "3fbe12b0150cc6ee81d3a1785b95c5629d875c6cd14684f3d4f6e305a2ab7724",
    "encoding/divergences.json": "76e4b83f8535368d9c0257f614efcb3f1a937bae5ec85da39de6923a7f9e6707",
    "encoding/p01_thinking_plain.json": "a1b287d6af77f56ab228b9c5b78297182d52e2e88c0f1808af07542f3d2634f6",
    "encoding/p02_chat_plain.json": "107a997f2286b827b4f25992d7a690e17cbd3a5fd7e10a8059509096b63f2e59",
    "encoding/p03_one_call_with_text.json": "381c15b2a69280b02bcb642f7d633d84b3190cef5d001861e3b6c5ab84215ddd",
    "encoding/p04_parallel_and_zero_args.json": "21d249fc1e123d762ddb27259e1ab0386fb37eb4d8149dd782ed24286e30cdef",
    "encoding/p05_string_values_verbatim.json": "4468f136e410feef264f61f7b64f1a37dbc2d6b8d2cf1121c912ff43065da2a3",
    "encoding/p06_json_values_verbatim.json": "4de1a6f3b95864edf53bb8d7d51289a8fb42d3c571b67ebe4373894a81496e35",
    "encoding/p07_truncated_in_arguments.json": "13538a387543c1d0419c578ed8f025a946c7b84f518a7df29d6f0eb51c5b102d",
    "encoding/p08_truncated_in_opener.json": "f3db85032724349d53496d38c21e2fbd35cd64768d01f405165a0413312fded6",
    "encoding/p09_call_without_think_end.json": "c1e2014b0bb32e1a37a3794a3d8b2f2d9bb35ae4fbb119bc1ea1ff81b29100d9",
    "encoding/p10_text_after_calls.json": "02523505f33e1d3e91e6ab999367d9ce2d8e25e52895f217ce7eba1f9917448c",
    "encoding/p11_dsml_without_tools.json": "5d10a1760070bd9c58663cf5e40b87361f126d2c0ca88265b35c5d897bcf6e06",
    "encoding/p12_newlines_kept.json": "f1e91b77d6bc9b7c7c5d60f541949e451e4e7ca41cb58be9321ba1f1033474d6",
    "encoding/p13_no_think_end.json": "bcf1b4325d40e10ea7e1092f23bab24cc8beaa63e98c10bfe7b1a78ed4a18620",
    "encoding/r01_single_user_default.json": "1ff2dcc682d0a7140f86b648cb500600e7fe091ccafee6f611f9b1fc34312f10",
    "encoding/r02_single_user_chat.json": "3f0c3b5e22e5ba2b01a1b5230b6f687c3a5eef9dcfc3b0ed5cfbc325d87edcb0",
    "encoding/r03_system_user_low.json": "9cfd9782ae5cc4fbd326929240e460c24922095ebb062c640bafc9a7b4a8f69d",
    "encoding/r04_integer_budget.json": "75dddd8a461d5850c161240293d6768caa274ecf45effff22d88337ac22b0e64",
    "encoding/r05_history_no_tools.json": "4e6e5ca3bcf5d70b52b88fc0fbfbf79b59dd9a250ec1745e18da554136791ca7",
    "encoding/r06_history_with_tools.json": "258fd5be2e59dd4b740e5fc328349cec06606a3c8a1655339fcb2ae810e83c14",
    "encoding/r07_parallel_calls_reordered.json": "1c5df339ee3657a66c7cc8f23090a6677dcdc83f3eaafd311d75e00281ed645e",
    "encoding/r08_user_after_tool_results.json": "fd5523edcd9296a3b37c9945ac35454b4b0db5057dcfbe2a84ad82fbfc9bd148",
    "encoding/r09_mid_system.json": "28ccae856ea96b3b52b724ceac4415c8d79f51ba9004a098657e2585d250062a",
    "encoding/r10_image_parts.json": "89b365516c800c871cc859adacb0da23ad724f9bd17d264eab39e4a93fdbaeee",
    "encoding/r11_json_schema.json": "b1f00a0e44660beba31d985076ec31a0a2817b4eb083332c683cd49ca2c7ac62",
    "encoding/r12_json_object_tools_chat.json": "19a80f4ad5611374cf76cc5261bb2105e0878fc9a863be139087960d669f40d1",
    "encoding/r13_zero_argument_call.json": "50ced986be5729e696efdde304afe3ffa14fdb0923c4a2234c97ab1f9b866eb3",
    "encoding/r14_latest_reminder.json": "5afe58eee8410b3105ee19ee20760743eb8f0e2c2d39f869c5a82d873a205e9e",
    "encoding/r15_tool_choice_none.json": "faad1bae489483c27fbc9af5cab393188fcc91079e336d7da2eaa75de578c5a0",
    "encoding/r16_missing_reasoning.json": "13faa7a5cb7c934b7cb63b1076b83da8b083bb0843342f1dff162ee26ef03fe9",
    "encoding/r17_special_spelling_in_text.json": "4ee384a7521646004bbc2f793ffadac800cf305f3520f0cb9532c9984830ebaa",
    "encoding/r18_tool_choice_required.json": "373c1b31e7edfcb242d3df3776b1aac7a3ec6bbf7aa4f81c807b9fd1dce5bce9",
    "encoding/r19_prefix_continuation.json": "e113b1879c6e1968096e4801ee6704622a7fb82508b916db2e7d0ec984001a03",
    "encoding/r20_v4_family.json": "41e87fcfe89e556288bfcda381d0368ddc9db25b3857e8ceb80d5cec02e8bcba",
    "encoding/t01_tools_thinking_extends.json": "d5b43a415fbc8892bc100659821fe369a8124208cd7e4ea9332e79e426476f2a",
    "encoding/t02_no_tools_thinking_rewrites.json": "9a793e59c9b5a30a2e2b86d20defd64eac2568ee307f11c62caa9865d2e92d85",
    "encoding/t03_chat_extends.json": "784aab15f1c9c85d17023c94f35ea97f6f885ee7840b258d16950a5cbbc50b71",
    "encoding/t04_effort_change.json": "02f3a4b8c867ae08cad639a78b73da241a4aa4d9e6f4766f17076383cc7d2568",
    "model/README.md": "c470aa24b5b775367020e19a55fd4ae03bfca59711e25ca91c51fdb87118f9b3",
    "model/SHA256SUMS": "21ed694e9cea1c03f6a248782d17ed9591710e90481e22853a577f470cc5ea87",
    "model/components.safetensors": "cfc8eef122cd9963ff4f72d8159e3214fe255837876ba47ab1e712efc50bb05f",
    "model/prompts.json": "a0377c162deb9b8d25dfa61cb3cd08b0d5a70e5f357a1030588fbeedcb6f9f28",
    "model/tiny-a-bf16/config.json": "9ee6b68f595c8b0af18131f9bf4c0dadb422865a48430541d0fb7270c7e8c615",
    "model/tiny-a-bf16/model.safetensors": "c8ccf3a793cd3d2f7f9d2d92c819da067a647d3253922a1e111fd833d1f911ff",
    "model/tiny-a-bf16/tokenizer.json": "fa725d494a78882c58b8d9f4c3bf6e7b0b634faaae92236d3f332485d6d60151",
    "model/tiny-a-bf16/tokenizer_config.json": "c745a1035157a7870456fc5d4c9d70acadd6cba09afa252ecef7565b36f82c5d",
    "model/tiny-a-fp8/config.json": "b63ac425f6b341a6a83058cd75d280abe3dc95de97036c6e1d1d2826d3858ac1",
    "model/tiny-a-fp8/model.safetensors": "2534b6e8c22841d2bfdf09a24e770c8c00cab9b962e6f7566797bf77b178e290",
    "model/tiny-a-fp8/tokenizer.json": "fa725d494a78882c58b8d9f4c3bf6e7b0b634faaae92236d3f332485d6d60151",
    "model/tiny-a-fp8/tokenizer_config.json": "c745a1035157a7870456fc5d4c9d70acadd6cba09afa252ecef7565b36f82c5d",
    "model/vectors-bf16.safetensors": "b49ed5e75be1a43d89e6b093e3181ca1ed422a213314640571bd459d154cee50",
    "model/vectors-fp32-qdq.safetensors": "d5e9514bd29d7087473f27e2c2c6336726f4722a0a33eef3608134f1cd7628b9",
    "model/vectors-fp32.safetensors": "e6ba51d931b1de06157f6022ff8a9b95d21450602fef8f519a533c385ad99f74",
    "model/vectors-fp8.safetensors": "fb48c6254419eb910c44dcce71e1c19341a7f4db3c2654b76428ab23a348bdd3",
}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_golden_files_are_untouched() -> None:
    found = {
        str(path.relative_to(GOLDEN)): digest(path) for path in GOLDEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == SHA256


def test_model_directory_agrees_with_its_own_checksum_list() -> None:
    lines = (GOLDEN / "model" / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {name.strip().lstrip("*").removeprefix("./"): value for value, name in (line.split(maxsplit=1) for line in lines if line)}
    assert listed
    assert {name: digest(GOLDEN / "model" / name) for name in listed} == listed
