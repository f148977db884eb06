//! What we write as YAML, Go's `sigs.k8s.io/yaml` and `kubectl kustomize` read back as what went
//! in: a corpus of strings that look like something else, and generated ones, as values and as
//! keys.

use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Map, Value, json};
use styrmin_renderer::yaml;
use styrmin_tests::tools::{run, tool};
use tokio::process::Command;

/// Strings that YAML readers take for something else, or that break writers.
const CORPUS: &[&str] = &[
    "706798e8",
    "0999991",
    "1.20",
    "y",
    "n",
    "Y",
    "N",
    "yes",
    "no",
    "on",
    "off",
    "NO",
    "Yes",
    "ON",
    "OFF",
    "~",
    "null",
    "Null",
    "NULL",
    "=",
    "<<",
    "true",
    "True",
    "false",
    "FALSE",
    "1_000",
    "0x1F",
    "0b11",
    "0o17",
    "017",
    "08",
    "1e3",
    "1E3",
    "1.0",
    ".5",
    "5.",
    "+1",
    "-1",
    "-0",
    "+.inf",
    "-.INF",
    ".nan",
    ".NaN",
    "1:30",
    "190:20:30",
    "2026-11-29",
    "2026-11-29T10:00:00Z",
    "2026-11-29 10:00:00",
    "",
    " ",
    "  ",
    "\t",
    "\n",
    "\n\n",
    "a\n",
    "a\n\n",
    "\na",
    " a",
    "a ",
    "a\tb",
    "a\r\nb",
    "\r",
    "a: b",
    "a:",
    ": a",
    ":",
    "- a",
    "-",
    "--",
    "---",
    "...",
    "--- a",
    "# a",
    "a # b",
    "a#b",
    "#",
    "?",
    "? a",
    "!",
    "!tag a",
    "!!str",
    "&a",
    "*a",
    "|",
    ">",
    "|-",
    "%",
    "%YAML",
    "@a",
    "`a",
    "'",
    "\"",
    "''",
    "\"\"",
    "it's",
    "say \"x\"",
    "\\",
    "\\n",
    "a\\b",
    "{",
    "}",
    "{}",
    "[",
    "]",
    "[]",
    "{a: b}",
    "[a, b]",
    ",",
    "a, b",
    "é",
    "日本語",
    "\u{1F600}",
    "\u{85}",
    "\u{a0}",
    "\u{2028}",
    "\u{2029}",
    "\u{feff}",
    "\u{feff}a",
    "a\u{feff}b",
    "\u{0}",
    "\u{1}",
    "\u{1b}[0m",
    "\u{7f}",
    "${VAR}",
    "{{ .Values.x }}",
    "$(VAR)",
    "key: |\n  text\n",
    "  indented\n less\n",
    "trailing \n space",
    "a\n ",
    "a\n\tb",
    "\u{2003}a",
    "0",
    "00",
    "0.0",
    "1e",
    "e1",
    "0x",
    "0xg",
    "infinity",
    "NaN",
    "-",
    "- ",
    "a:b",
    "http://x:80/y?z=1#f",
    "<<: *a",
];

fn texts() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(CORPUS).prop_map(str::to_owned),
        (prop::sample::select(CORPUS), prop::sample::select(CORPUS)).prop_map(|(a, b)| format!("{a}{b}")),
        "[0-9a-fA-FxXoOeE_.:+-]{1,12}",
        "[ \\n\\t#:'\"\\\\|>%@`&*!?{}\\[\\],a-]{0,12}",
        "\\PC{0,20}",
        any::<String>(),
    ]
}

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        4 => texts().prop_map(Value::from),
        1 => any::<i64>().prop_map(Value::from),
        1 => (-1e15..1e15f64).prop_map(Value::from),
        1 => any::<bool>().prop_map(Value::from),
        1 => Just(Value::Null),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((texts(), inner), 0..4).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// Whether kustomize can carry every string of a tree. What it cannot is refused at the mutation.
fn carriable(value: &Value) -> bool {
    match value {
        Value::String(text) => yaml::uncarriable(text).is_none(),
        Value::Array(items) => items.iter().all(carriable),
        Value::Object(map) => map
            .iter()
            .all(|(key, child)| key != yaml::MERGE_KEY && yaml::uncarriable(key).is_none() && carriable(child)),
        _ => true,
    }
}

/// The corpus as values and as keys, and `count` generated trees; the same every time.
fn documents(count: usize) -> Vec<Value> {
    let mut found: Vec<Value> = CORPUS
        .iter()
        .map(|text| json!({ "value": text, "list": [text, [text]], (*text): (*text), "inner": { (*text): { (*text): 1 } } }))
        .collect();
    let seed = *b"styrmin writes what Go will read";
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
    let strategy = prop::collection::vec((texts(), values()), 1..4);
    found.extend((0..count).map(|_| {
        let pairs = strategy.new_tree(&mut runner).unwrap().current();
        Value::Object(pairs.into_iter().collect::<Map<String, Value>>())
    }));
    found
}

/// Numbers as Go's float64 and int64 give them back.
fn same(one: &Value, other: &Value) -> bool {
    styrmin_renderer::canonical::to_string(one) == styrmin_renderer::canonical::to_string(other)
}

#[tokio::test]
async fn go_reads_back_what_we_write() {
    let documents = documents(6000);
    let mut frames = Vec::new();
    let mut texts = Vec::new();
    for document in &documents {
        let text = yaml::to_string(document).unwrap();
        frames.extend(format!("{}\n{text}", text.len()).into_bytes());
        assert_eq!(&yaml::from_str::<Value>(&text).unwrap(), document, "we do not read it back: {text}");
        texts.push(text);
    }
    let answer = run(&mut Command::new(tool("yamlcheck")), &frames).await;
    let answer = String::from_utf8(answer).unwrap();
    let lines: Vec<&str> = answer.split_terminator('\n').collect();
    assert_eq!(lines.len(), documents.len());
    for ((document, text), line) in documents.iter().zip(&texts).zip(lines) {
        let read: Value =
            serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}\nfor {document}\nwritten as {text}"));
        assert!(same(&read, document), "Go reads {read}\nfor {document}\nwritten as {text}");
    }
}

/// What becomes of a ConfigMap's data.
async fn kustomize_one(data: Value) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let object = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x" }, "data": data });
    std::fs::write(folder.path().join("x.yaml"), yaml::to_string(&object).unwrap()).unwrap();
    std::fs::write(folder.path().join("kustomization.yaml"), "resources: [x.yaml]\n").unwrap();
    let output = Command::new(tool("kubectl")).arg("kustomize").arg(folder.path()).output().await.unwrap();
    let read = run(Command::new(tool("yamlcheck")).arg("stream"), &output.stdout).await;
    serde_json::from_slice::<Value>(&read).map(|read| read["data"].clone()).unwrap_or_default()
}

/// The list of characters that are refused is no longer than it must be.
#[tokio::test]
async fn kustomize_cannot_carry_what_is_refused() {
    for character in ['\u{7f}', '\u{80}', '\u{85}', '\u{9f}', '\u{fffe}', '\u{ffff}'] {
        let text = format!("a{character}b");
        assert_eq!(yaml::uncarriable(&text), Some(character));
        assert_ne!(
            kustomize_one(json!({ "v": text })).await,
            json!({ "v": text }),
            "{character:?} is carried after all"
        );
    }
    let merge = json!({ (yaml::MERGE_KEY): "x" });
    assert_ne!(kustomize_one(merge.clone()).await, merge, "the merge key is carried after all");
    assert_eq!(kustomize_one(json!({ "v": "<<" })).await, json!({ "v": "<<" }));
}

#[tokio::test]
async fn kustomize_gives_back_what_we_write() {
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<Value> = documents(1500).into_iter().filter(carriable).collect();
    assert!(documents.len() > 1000);
    let mut resources = Vec::new();
    for (index, document) in documents.iter().enumerate() {
        let object = json!({
            "apiVersion": "styrmin.io/v1alpha1",
            "kind": "StyrminDeployment",
            "metadata": { "name": format!("d{index:05}"), "namespace": "e" },
            "spec": { "context": document },
        });
        let name = format!("d{index:05}.yaml");
        std::fs::write(folder.path().join(&name), yaml::to_string(&object).unwrap()).unwrap();
        resources.push(name);
    }
    let kustomization =
        json!({ "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources });
    std::fs::write(folder.path().join("kustomization.yaml"), yaml::to_string(&kustomization).unwrap()).unwrap();
    let built = run(Command::new(tool("kubectl")).arg("kustomize").arg(folder.path()), b"").await;
    let read = run(Command::new(tool("yamlcheck")).arg("stream"), &built).await;
    let read: Vec<Value> = String::from_utf8(read)
        .unwrap()
        .split_terminator('\n')
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(read.len(), documents.len());
    for object in read {
        let index: usize = object["metadata"]["name"].as_str().unwrap()[1..].parse().unwrap();
        let (found, expected) = (&object["spec"]["context"], &documents[index]);
        assert!(same(found, expected), "kustomize gives {found}\nfor {expected}");
    }
}
