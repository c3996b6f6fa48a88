import re, subprocess
from pathlib import Path
files = [Path(p) for p in subprocess.run(["git","ls-files","-c","-o","--exclude-standard","*.py"],capture_output=True,text=True).stdout.split() if Path(p).exists()]
def each(pattern_line, attr, module_import, new_prefix=None):
    """Replace `import X as attr` lines and attr.<name> uses."""
for f in files:
    t = b = f.read_text()
    if "from train.data import datasets as data" in t:
        names = sorted(set(re.findall(r"(?<![\w.])data\.([A-Za-z_]\w*)", t)))
        own = [n for n in names if n in {"Datasets","InMemoryDataset","load","move_to_device","size","_normalize","Batch","Preprocess"}]
        t = re.sub(r"(?<![\w.])data\.(Datasets|InMemoryDataset|load|move_to_device|size|_normalize)\b", r"\1", t)
        m = re.search(r"^from train\.data\.datasets import (.*)$", t, re.M)
        t = t.replace("from train.data import datasets as data\n", "" if m else f"from train.data.datasets import {', '.join(own)}\n")
        if m:
            t = t.replace(m[0], "from train.data.datasets import " + ", ".join(sorted({*own, *m[1].split(", ")})))
    if "loss as losses" in t:
        own = sorted(set(re.findall(r"(?<![\w.])losses\.([A-Za-z_]\w*)", t)))
        t = re.sub(r"(?<![\w.])losses\.([A-Za-z_]\w*)", r"\1", t)
        t = t.replace("from train import loss as losses\n", f"from train.loss import {', '.join(own)}\n")
    if "full as snapshot" in t:
        t = t.replace("from train.checkpoint import full as snapshot\n", "from train.checkpoint import full\n")
        t = re.sub(r"(?<![\w./\"'-])snapshot\.(?=(save|remove|remove_temporary_files|load_local|load_newest|newest_step|NAME|PREVIOUS|TEMPORARY|FORMAT|State|sync|_)\b)", "full.", t)
    if "sharded as sharded_snapshot" in t:
        t = t.replace("from train.checkpoint import sharded as sharded_snapshot\n", "from train.checkpoint import sharded\n")
        t = re.sub(r"(?<![\w./\"'-])sharded_snapshot\.", "sharded.", t)
    if "select as parallel" in t:
        t = t.replace("from train.parallel import select as parallel\n", "from train.parallel import select\n")
        t = re.sub(r"(?<![\w./\"'-])parallel\.(?=build\b)", "select.", t)
    if "device as devices" in t:
        t = t.replace("from train.distributed import device as devices\n", "from train.distributed import device\n")
        t = re.sub(r"(?<![\w./\"'-])devices\.(?=(select_device|set_numerics|keep_freed_memory|move)\b)", "device.", t)
    if "output as metrics" in t:
        t = t.replace("from train.record import output as metrics\n", "from train.record import output\n")
        t = re.sub(r"(?<![\w./\"'-])metrics\.(?=(average|step_line|METRICS|STATUS|make_output_folder|Metrics|_)\b)", "output.", t)
    if "files as datafiles" in t:
        t = t.replace("from train.data import files as datafiles\n", "from train.data import files\n")
        t = re.sub(r"(?<![\w./\"'-])datafiles\.", "files.", t)
    # one meaning of "shard": parameters and state, not the samples of a rank
    t = re.sub(r"\bGlobalBatchSampler\b", "GlobalBatchSampler", t)
    if t != b:
        f.write_text(t)
