//! Charts, kinds and the first chapter of the guide: from nothing to a deployment that runs.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use styrmin_renderer::{objects, spec};
use styrmin_tests::plane::{Options, Plane, Port, Program, Recipe, is_ready};
use styrmin_tests::server::{drivers, program, text_files};
use styrmin_tests::tools::{run, tool};
use styrmin_tests::world::{LIMIT, documents};
use styrmin_tests::{charts, eventually, http};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The packaged charts, as people get them: Flux's kinds are in them.
async fn packaged(folder: &Path) -> PathBuf {
    run(Command::new(root().join("scripts/charts")).arg(folder), &[]).await;
    folder.join("styrmin-agent-0.1.0.tgz")
}

const AGENT: &[&str] = &["server.address=https://styrmin.example.com"];
const SERVER: &[&str] = &["publicUrl=https://styrmin.example.com", "keys.secretName=styrmin-keys"];

#[tokio::test(flavor = "multi_thread")]
async fn charts_render_as_written_down() {
    let folder = tempfile::tempdir().unwrap();
    let package = packaged(folder.path()).await;
    let agent_all = [
        AGENT[0],
        "flux.enabled=true",
        "image.registry=mirror.example.com/",
        "image.pullSecrets[0].name=pull",
        "replicas=2",
        "metrics.podMonitor.enabled=true",
        "authority.configMapName=authority",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
        "env[0].name=HTTPS_PROXY",
        "env[0].value=http://proxy.example.com",
    ];
    let agent_least = [AGENT[0], "crdUpgrade.enabled=false", "protection.enabled=false", "networkPolicy.enabled=false"];
    let postgresql = [
        SERVER[0],
        SERVER[1],
        "database.kind=postgresql",
        "database.postgresql.secretName=database",
        "replicas=3",
        "ingress.enabled=true",
        "ingress.className=nginx",
        "ingress.host=styrmin.example.com",
        "ingress.tlsSecretName=tls",
        "metrics.serviceMonitor.enabled=true",
        "drivers.configMaps[0].name=driver-web",
        "drivers.configMaps[0].folder=web-1.0.0",
    ];
    let volume = [
        SERVER[0],
        SERVER[1],
        "persistence.existingClaim=data",
        "drivers.volume.persistentVolumeClaim.claimName=drivers",
    ];
    for (name, chart, namespace, settings) in [
        ("agent", charts::folder("agent"), "styrmin-system", AGENT),
        ("agent-all", package, "styrmin-system", &agent_all),
        ("agent-least", charts::folder("agent"), "styrmin-system", &agent_least),
        ("server", charts::folder("server"), "styrmin", SERVER),
        ("server-postgresql", charts::folder("server"), "styrmin", &postgresql),
        ("server-volumes", charts::folder("server"), "styrmin", &volume),
    ] {
        let text = charts::template(&chart, namespace, settings).await;
        let mut objects = documents(&text);
        // What Flux's kinds are is Flux's.
        for data in objects.iter_mut().filter_map(|object| object.get_mut("data")?.as_object_mut()) {
            data.values_mut().for_each(|value| *value = "…".into());
        }
        objects.sort_by_key(|object| {
            [&object["kind"], &object["metadata"]["namespace"], &object["metadata"]["name"]].map(ToString::to_string)
        });
        let found = objects::documents(&objects).unwrap();
        let path = root().join("tests/charts").join(format!("{name}.yaml"));
        if std::env::var_os("STYRMIN_UPDATE").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &found).unwrap();
        }
        let wanted = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == wanted,
            "{} is old: STYRMIN_UPDATE=1 cargo test -p styrmin-tests install::charts",
            path.display()
        );
        let mut lint = Command::new(tool("helm"));
        lint.arg("lint").arg("--strict").arg(&chart).args(["--namespace", namespace]);
        for setting in settings {
            lint.args(["--set", setting]);
        }
        run(&mut lint, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn values_that_cannot_work_are_refused_with_what_to_do() {
    for (chart, namespace, settings, said) in [
        ("agent", "styrmin-system", vec![], "server.address is empty: set it"),
        ("agent", "default", vec![AGENT[0]], "install it with --namespace styrmin-system, not default"),
        ("agent", "styrmin-system", vec!["server.address=styrmin"], "'styrmin' does not match pattern"),
        ("agent", "styrmin-system", vec![AGENT[0], "flux.enabled=true"], "flux.enabled needs a packaged chart"),
        (
            "agent",
            "styrmin-system",
            vec![AGENT[0], "operator.deploymentReadyTimeout=300"],
            "has to be below operator.helmReleaseTimeout",
        ),
        ("agent", "styrmin-system", vec![AGENT[0], "replica=2"], "additional properties 'replica' not allowed"),
        ("server", "styrmin", vec![SERVER[1]], "publicUrl is empty: set it"),
        ("server", "styrmin", vec![SERVER[0]], "make the keys with `styrmin-server keys"),
        (
            "server",
            "styrmin",
            vec![SERVER[0], SERVER[1], "replicas=2"],
            "SQLite serves one: use database.kind=postgresql",
        ),
        (
            "server",
            "styrmin",
            vec![SERVER[0], SERVER[1], "database.kind=postgresql"],
            "database.postgresql.secretName is empty",
        ),
        (
            "server",
            "styrmin",
            vec![SERVER[0], SERVER[1], "database.kind=mysql"],
            "value must be one of 'sqlite', 'postgresql'",
        ),
        ("server", "styrmin", vec![SERVER[0], SERVER[1], "ingress.enabled=true"], "ingress.host is empty"),
    ] {
        let mut command = Command::new(tool("helm"));
        command.arg("template").arg("release").arg(charts::folder(chart)).args([
            "--namespace",
            namespace,
            "--kube-version",
            "1.36.0",
        ]);
        for setting in &settings {
            command.args(["--set", setting]);
        }
        let output = command.output().await.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains(said), "{settings:?}: {error}");
    }
}

/// Runs the command of the chart's Job under its own account; gives whether it succeeded, and what it said.
async fn apply_crds(plane: &Plane, folder: &Path) -> (bool, String) {
    let hooks = charts::agent(true).await;
    let job = hooks.iter().find(|object| object["kind"] == "Job").unwrap();
    let pod = &job["spec"]["template"]["spec"];
    for object in hooks.iter().filter(|object| object["kind"] != "Job") {
        plane.apply(object).await;
    }
    let account = pod["serviceAccountName"].as_str().unwrap();
    let token = plane.kubectl(&["-n", "styrmin-system", "create", "token", account]).await;
    let kubeconfig = plane.kubeconfig_of(account, token.trim());
    let arguments: Vec<&str> =
        pod["containers"][0]["args"].as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    let mut command = Command::new(program("styrmin-agent"));
    command.args(&arguments).arg("--folder").arg(folder).env("KUBECONFIG", kubeconfig);
    let output = command.kill_on_drop(true).output().await.unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kind_is_brought_up_to_date_or_the_install_fails() {
    let plane = Plane::start_with(Options { controllers: false, ..Options::default() }).await;
    plane.apply(&objects::system_namespace()).await;
    let folder = tempfile::tempdir().unwrap();
    let crd = ["apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "styrmindeployments.styrmin.io"];
    let found = async || plane.get(&crd).await.unwrap();
    let versions = |found: &Value| {
        let names = found["spec"]["versions"].as_array().unwrap().iter().map(|one| one["name"].clone());
        Value::Array(names.collect())
    };
    // None is there.
    let (fine, said) = apply_crds(&plane, folder.path()).await;
    assert!(fine, "{said}");
    let made = found().await;
    assert_eq!(versions(&made), json!(["v1alpha1"]));
    // The same again.
    assert!(apply_crds(&plane, folder.path()).await.0);
    let same = found().await;
    assert_eq!(same["metadata"]["resourceVersion"], made["metadata"]["resourceVersion"], "nothing is written twice");

    // An older one, of a version that is not there any more, with an object.
    plane.kubectl(&["delete", "crd", crd[3]]).await;
    let mut older = spec::crd();
    older["spec"]["versions"][0]["name"] = "v1alpha0".into();
    older["spec"]["versions"][0]["schema"]["openAPIV3Schema"] =
        json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    plane.apply(&older).await;
    plane.kubectl(&["wait", "--for=condition=established", "crd", crd[3], "--timeout=30s"]).await;
    let object = json!({ "apiVersion": "styrmin.io/v1alpha0", "kind": "StyrminDeployment", "metadata": { "name": "old", "namespace": "default" } });
    plane.apply(&object).await;
    let other = json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "things.example.com" },
        "spec": { "group": "example.com", "scope": "Namespaced", "names": { "kind": "Thing", "plural": "things" },
            "versions": [{ "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": { "type": "object" } } }] } });
    std::fs::write(folder.path().join("things.yaml"), other.to_string()).unwrap();
    // A kind that is none of the chart's, so neither are the rights.
    let rules = json!([{ "apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"],
        "resourceNames": ["things.example.com"], "verbs": ["get", "patch", "delete"] }]);
    let of = |kind: &str| json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": { "name": "things" } });
    let (mut role, mut binding) = (of("ClusterRole"), of("ClusterRoleBinding"));
    role["rules"] = rules;
    binding["roleRef"] = json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "things" });
    binding["subjects"] =
        json!([{ "kind": "ServiceAccount", "name": "styrmin-agent-crds", "namespace": "styrmin-system" }]);
    plane.apply(&role).await;
    plane.apply(&binding).await;
    let before = found().await;
    let (fine, said) = apply_crds(&plane, folder.path()).await;
    assert!(!fine, "{said}");
    for part in [
        "styrmindeployments.styrmin.io",
        "version v1alpha0",
        "StyrminDeployment default/old",
        "in version v1alpha1",
        "Nothing was changed",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(found().await, before);
    let things = ["apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "things.example.com"];
    assert_eq!(plane.get(&things).await, None, "nor is any other kind changed");

    // Without objects it is made anew.
    plane.kubectl(&["delete", "styrmindeployments.v1alpha0.styrmin.io", "old", "-n", "default"]).await;
    let (fine, said) = apply_crds(&plane, folder.path()).await;
    assert!(fine, "{said}");
    let after = found().await;
    assert_eq!(versions(&after), json!(["v1alpha1"]));
    assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"]);
    assert!(plane.get(&things).await.is_some());
    // What it may not: touch the objects.
    let can = [
        "auth",
        "can-i",
        "create",
        "styrmindeployments.styrmin.io",
        "--as=system:serviceaccount:styrmin-system:styrmin-agent-crds",
    ];
    plane.kubectl_fails(&can).await;
    std::fs::write(folder.path().join("wrong.yaml"), "kind: ConfigMap\n").unwrap();
    let (fine, said) = apply_crds(&plane, folder.path()).await;
    assert!(!fine && said.contains("wrong.yaml") && said.contains("is no CustomResourceDefinition"), "{said}");
    plane.stop().await;
}

/// The commands of the guide's first chapter.
fn commands() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("docs/install.md")).unwrap();
    let chapter = text.split("\n## ").find(|part| part.starts_with("In five minutes")).unwrap();
    let blocks = chapter.split("```sh\n").skip(1).filter_map(|part| part.split_once("```"));
    blocks.flat_map(|(block, _)| block.lines()).map(str::to_owned).collect()
}

/// A shell that keeps what it was told, line by line.
struct Shell {
    child: Child,
    input: ChildStdin,
    output: tokio::io::Lines<BufReader<ChildStdout>>,
}

impl Shell {
    fn start(folder: &Path, environment: &[(&str, String)]) -> Self {
        let mut command = Command::new("bash");
        command.current_dir(folder).env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
        let (mut input, mut output) = (child.stdin.take(), child.stdout.take());
        let output = BufReader::new(output.take().unwrap()).lines();
        Self { input: input.take().unwrap(), output, child }
    }

    /// Runs a line; gives what it printed.
    async fn run(&mut self, line: &str) -> String {
        self.input.write_all(format!("{line} 2>&1\necho \"ended: $?\"\n").as_bytes()).await.unwrap();
        let mut text = String::new();
        let read = async {
            while let Some(said) = self.output.next_line().await.unwrap() {
                if let Some((_, status)) = said.split_once("ended: ") {
                    assert_eq!(status, "0", "{line}\n{text}");
                    return;
                }
                text.push_str(&said);
                text.push('\n');
            }
            panic!("the shell ended after {line}\n{text}");
        };
        tokio::time::timeout(Duration::from_secs(200), read).await.unwrap_or_else(|_| panic!("{line} does not end"));
        text
    }
}

/// The environment of a workload's container, with what it takes from elsewhere.
async fn environment(plane: &Plane, namespace: &str, name: &str) -> BTreeMap<String, String> {
    let deployment = plane.get(&["apps/v1", "Deployment", namespace, name]).await.unwrap();
    let mut found = BTreeMap::new();
    for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"].as_array().unwrap() {
        let from = &variable["valueFrom"];
        let value = if let Some(reference) = from["secretKeyRef"].as_object() {
            secret(plane, namespace, reference["name"].as_str().unwrap()).await[reference["key"].as_str().unwrap()]
                .clone()
        } else if !from.is_null() {
            format!("{name}-1")
        } else {
            variable["value"].as_str().unwrap().to_owned()
        };
        found.insert(variable["name"].as_str().unwrap().to_owned(), value);
    }
    found
}

async fn secret(plane: &Plane, namespace: &str, name: &str) -> BTreeMap<String, String> {
    use base64::Engine as _;
    let found = plane.get(&["v1", "Secret", namespace, name]).await.unwrap();
    let decoded = |text: &Value| {
        let bytes = base64::engine::general_purpose::STANDARD.decode(text.as_str().unwrap()).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    found["data"].as_object().unwrap().iter().map(|(key, value)| (key.clone(), decoded(value))).collect()
}

/// Runs a workload's program beside its simulated pods, with the same environment. `paths` are what its volumes are
/// here.
async fn beside(
    plane: &Plane,
    namespace: &str,
    name: &str,
    more: &[(&str, String)],
    paths: &[(&str, &Path)],
) -> Program {
    let mut environment = environment(plane, namespace, name).await;
    for value in environment.values_mut() {
        for (mounted, here) in paths {
            if let Some(rest) = value.strip_prefix(mounted) {
                *value = format!("{}{rest}", here.display());
            }
        }
    }
    environment.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    environment.insert("PATH".into(), std::env::var("PATH").unwrap());
    let recipe = Recipe {
        name: name.to_owned(),
        program: program(name),
        arguments: Vec::new(),
        environment: environment.into_iter().collect(),
        folder: plane.folder().to_owned(),
    };
    Program::start(recipe, plane.logs())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_chapter_leads_to_a_deployment_that_runs() {
    let plane = Plane::start_with(Options::default()).await;
    let work = tempfile::tempdir().unwrap();
    let bin = work.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    for (name, path) in [
        ("kubectl", tool("kubectl")),
        ("helm", tool("helm")),
        ("styrminctl", program("styrminctl")),
        ("styrmin-server", program("styrmin-server")),
    ] {
        std::os::unix::fs::symlink(path, bin.join(name)).unwrap();
    }
    std::os::unix::fs::symlink(root().join("helm"), work.path().join("helm")).unwrap();
    let (port, metrics, others) = (Port::claim(), Port::claim(), Port::claim());
    let address = format!("http://{}", port.address());
    let mut shell = Shell::start(
        work.path(),
        &[
            ("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap())),
            ("HOME", work.path().display().to_string()),
            ("KUBECONFIG", plane.kubeconfig().display().to_string()),
        ],
    );
    let (mut server, mut agent) = (None, None);
    for line in commands() {
        let line = line.replace("https://styrmin.example.com", &address);
        eprintln!("$ {line}");
        let said = shell.run(&line).await;
        if line.starts_with("helm install styrmin-server") {
            let keys = work.path().join("mounted");
            std::fs::create_dir(&keys).unwrap();
            for (name, text) in secret(&plane, "styrmin", "styrmin-keys").await {
                std::fs::write(keys.join(name), text).unwrap();
            }
            let (data, drivers) = (work.path().join("data"), drivers());
            let paths: [(&str, &Path); 3] = [("/data", &data), ("/keys", &keys), ("/styrmin/drivers", &drivers)];
            let own = [("STYRMIN_LISTEN", port.address()), ("STYRMIN_METRICS_LISTEN", metrics.address())];
            server = Some(beside(&plane, "styrmin", "styrmin-server", &own, &paths).await);
            eventually("the server is ready", LIMIT, async || {
                let answer = http().get(format!("{address}/readyz")).send().await;
                if answer.is_ok_and(|answer| answer.status() == 200) { Ok(()) } else { Err(()) }
            })
            .await;
            let text = http().get(format!("http://{}/metrics", metrics.address())).send().await.unwrap().text().await;
            assert!(text.unwrap().contains("styrmin_"), "metrics need no token at their own port");
        } else if line.starts_with("styrminctl clusters bootstrap") {
            // As the Job of the chart does, whose pod is simulated.
            let none = tempfile::tempdir().unwrap();
            let (fine, said) = apply_crds(&plane, none.path()).await;
            assert!(fine, "{said}");
            let mounted = work.path().join("token");
            std::fs::create_dir(&mounted).unwrap();
            let token = secret(&plane, "styrmin-system", "styrmin-agent").await;
            std::fs::write(mounted.join("token"), &token["token"]).unwrap();
            let account =
                plane.kubectl(&["-n", "styrmin-system", "create", "token", "styrmin-agent", "--duration=1h"]).await;
            let kubeconfig = plane.kubeconfig_of("agent", account.trim());
            let own = [("KUBECONFIG", kubeconfig.display().to_string()), ("STYRMIN_METRICS_LISTEN", others.address())];
            agent =
                Some(beside(&plane, "styrmin-system", "styrmin-agent", &own, &[("/var/run/styrmin", &mounted)]).await);
        } else if line.starts_with("styrminctl clusters doctor") {
            assert!(said.lines().all(|line| line.starts_with("OK ")), "{said}");
        } else if line.starts_with("kubectl get styrmindeployments") {
            assert!(said.contains("web-application") && said.contains("Running"), "{said}");
        }
    }
    // The chart's own pods are there too, under the profile that it asks for.
    for (namespace, name) in [("styrmin", "styrmin-server"), ("styrmin-system", "styrmin-agent")] {
        plane
            .until(&["apps/v1", "Deployment", namespace, name], LIMIT, |found| {
                found.is_some_and(|found| found["status"]["readyReplicas"] == 1)
            })
            .await;
    }
    // The same once more is the same.
    let again = commands().into_iter().find(|line| line.starts_with("styrminctl clusters bootstrap")).unwrap();
    let before = text_files(&work.path().join("prod"));
    shell.run(&again).await;
    assert_eq!(text_files(&work.path().join("prod")), before);
    use std::os::unix::fs::PermissionsExt as _;
    for name in before.keys() {
        let mode = std::fs::metadata(work.path().join("prod").join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{name} is its owner's alone");
    }
    // With the folder lost, only another token helps.
    std::fs::rename(work.path().join("prod/agent-token"), work.path().join("lost")).unwrap();
    let said = shell.run(&format!("! {again}")).await;
    assert!(said.contains("--new-token"), "{said}");
    shell.run(&format!("{again} --new-token")).await;
    let new = std::fs::read_to_string(work.path().join("prod/agent-token")).unwrap();
    assert_ne!(new, std::fs::read_to_string(work.path().join("lost")).unwrap());
    // The mounted Secret follows, and the agent reads it again.
    std::fs::write(work.path().join("token/token"), &new).unwrap();
    shell.run("styrminctl clusters doctor prod --wait 120").await;
    // An upgrade over the kind of the build before: the Job's own command brings it up to date, and objects stay.
    let older = std::fs::read_to_string(root().join("tests/fixtures/crd-before.yaml")).unwrap();
    plane.apply(&documents(&older)[0]).await;
    let crd = ["apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "styrmindeployments.styrmin.io"];
    let applied = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/appliedDigest";
    assert_eq!(plane.get(&crd).await.unwrap().pointer(applied), None, "it is older");
    shell.run("helm upgrade styrmin-agent helm/agent --namespace styrmin-system --values prod/values.yaml").await;
    let none = tempfile::tempdir().unwrap();
    let (fine, said) = apply_crds(&plane, none.path()).await;
    assert!(fine, "{said}");
    assert!(plane.get(&crd).await.unwrap().pointer(applied).is_some());
    assert!(shell.run("kubectl get styrmindeployments --all-namespaces").await.contains("Running"));

    // From here on the agent is upgraded through the repository: Flux takes over the release that helm made.
    let said = shell.run("! styrminctl clusters agent prod").await;
    assert!(said.contains("values: are not known"), "{said}");
    shell.run("echo '{server: {address: \"http://s\"}, flux: {enabled: true}}' > with-flux.yaml").await;
    let said = shell.run("! styrminctl clusters agent prod --values with-flux.yaml").await;
    assert!(said.contains("values.flux.crds: has to be false"), "{said}");
    shell.run("styrminctl clusters agent prod --values prod/values.yaml").await;
    let release = ["helm.toolkit.fluxcd.io/v2", "HelmRelease", "styrmin-system", "styrmin-agent"];
    plane.until(&release, LIMIT, is_ready).await;
    shell.run("echo 'replicas: 2' >> prod/values.yaml").await;
    shell.run("styrminctl clusters agent prod --values prod/values.yaml").await;
    let deployment = ["apps/v1", "Deployment", "styrmin-system", "styrmin-agent"];
    plane.until(&deployment, LIMIT, |found| found.is_some_and(|found| found["spec"]["replicas"] == 2)).await;
    plane.until(&release, LIMIT, is_ready).await;
    let history = shell.run("helm --namespace styrmin-system history styrmin-agent --output json").await;
    let history: Value = serde_json::from_str(&history).unwrap();
    assert!(history.as_array().unwrap().len() >= 3, "one release from the first install on: {history}");
    shell.run("styrminctl clusters doctor prod --wait 120").await;
    shell.run("styrmin-server --data data backup --to copy").await;
    assert!(work.path().join("copy/backup.json").exists());
    drop((server, agent));
    let _ = shell.child.kill().await;
    plane.stop().await;
}
