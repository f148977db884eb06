//! Golden files for every object that Styrmin renders, from the drivers of this source tree.
//! `INSTA_UPDATE=always cargo test -p styrmin-renderer` writes them; a change of them is a change
//! of what clusters get, and is read in review.

#![expect(clippy::unwrap_used, reason = "tests fail loudly")]

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use styrmin_renderer::config::Object;
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::driver::format::{Hook, Mode, Step};
use styrmin_renderer::names::EnvironmentId;
use styrmin_renderer::objects::{self, ReleaseSettings, Repository};
use styrmin_renderer::plan::{self, StepKind, Workflow};
use styrmin_renderer::spec::{self, DriverRef, JobRun, Lifecycle, StyrminDeploymentSpec};
use styrmin_renderer::{diff, hooks, network, post_render, yaml};

fn read(folder: &Path, base: &Path, files: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read(&path, base, files);
        } else {
            let name = path.strip_prefix(base).unwrap().to_string_lossy().into_owned();
            files.insert(name, std::fs::read_to_string(&path).unwrap());
        }
    }
}

fn driver(name: &str) -> Driver {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers").join(name);
    let mut files = BTreeMap::new();
    read(&folder, &folder, &mut files);
    Driver::from_files(files).unwrap_or_else(|problems| panic!("{name}: {problems:?}"))
}

/// The web application from charts elsewhere, with actions.
fn elsewhere(chart: &str, actions: &str) -> Driver {
    let text = format!(
        "apiVersion: styrmin.io/v1\nkind: ApplicationDriver\nmetadata: {{name: elsewhere}}\nspec:\n  version: 2.0.0+build.7\n  supported_versions: '*'\n  helm: {{main: {chart}}}\n  components:\n    web: {{identifier: {{label: {{app: web}}}}, replicas: 2, containers: [web]}}\n{actions}"
    );
    Driver::from_files(BTreeMap::from([("driver.styrmin.yml".to_owned(), text)])).unwrap()
}

fn object(value: Value) -> Object {
    serde_json::from_value(value).unwrap()
}

fn spec_of(
    driver: &Driver,
    version: &str,
    parameters: Value,
    fingerprints: BTreeMap<String, String>,
) -> StyrminDeploymentSpec {
    let resolution = context::resolve(&Inputs {
        cluster: Named { id: "clusterclust".parse().unwrap(), name: "prod".into() },
        environment: Named { id: "environmentx".parse().unwrap(), name: "shop".into() },
        deployment: Named { id: "k7m2q9xw4t1a".parse().unwrap(), name: "front".into() },
        driver,
        application_version: version,
        cluster_config: &object(
            json!({ "fqdn_suffix": "apps.example.com", "standard_storage": { "storage_class": "fast" } }),
        ),
        environment_config: &object(json!({ "env_vars": { "STAGE": "prod", "NOTHING": null } })),
        deployment_config: &Object::new(),
        parameters: &object(parameters),
        secret_fingerprints: &fingerprints,
    })
    .unwrap();
    StyrminDeploymentSpec {
        deployment_id: "k7m2q9xw4t1a".parse().unwrap(),
        instance_id: "01890a5d-ac96-774b-bcce-b302099a8057".into(),
        lifecycle: Lifecycle::Running,
        driver: DriverRef {
            name: driver.name().into(),
            version: driver.version.to_string(),
            digest: "sha256:0123456789abcdef".into(),
        },
        application_version: version.into(),
        context: resolution.context,
        jobs: Vec::new(),
    }
}

fn web() -> StyrminDeploymentSpec {
    spec_of(
        &driver("web-application"),
        "706798e8",
        json!({ "image": "ghcr.io/example/shop", "config": { "yes": "on" }, "files": { "a.conf": "line: 1\n${X}\n" } }),
        BTreeMap::new(),
    )
}

fn postgresql() -> StyrminDeploymentSpec {
    spec_of(
        &driver("postgresql"),
        "17",
        json!({}),
        BTreeMap::from([("password".to_owned(), "a1b2c3d4e5f60718".to_owned())]),
    )
}

fn repository() -> Repository {
    Repository {
        url: "https://git.example.com/prod.git".into(),
        branch: "main".into(),
        prefix: "clusters/prod".into(),
        secret: Some("styrmin-git".into()),
    }
}

/// A driver whose digest does not depend on the files, so that goldens change only with objects.
fn pinned(mut driver: Driver) -> Driver {
    driver.digest = "sha256:0123456789abcdef".into();
    driver
}

fn golden(name: &str, objects: &[Value]) {
    let text = objects::documents(objects).unwrap();
    insta::with_settings!({ snapshot_path => "golden", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn styrmin_deployments() {
    let environment = "environmentx".parse().unwrap();
    golden("styrmindeployment_web", &[spec::object(&web(), &environment, 7)]);
    golden("styrmindeployment_postgresql", &[spec::object(&postgresql(), &environment, 1)]);
    golden("crd", &[spec::crd()]);
}

#[test]
fn objects_of_a_cluster_and_an_environment() {
    let environment = "environmentx".parse().unwrap();
    golden("flux_root", &objects::flux_root(&repository()));
    golden("system_namespace", &[objects::system_namespace()]);
    golden(
        "environment",
        &[
            objects::environment_namespace(&environment, "shop"),
            objects::shard_kustomization(&environment, 0, "clusters/prod"),
            objects::shard_kustomization(&environment, 1, ""),
            objects::shard_keep(&environment, 0),
        ],
    );
    golden("application_namespace", &[objects::application_namespace(&web(), &environment)]);
}

#[test]
fn objects_of_a_driver() {
    let environment = "environmentx".parse().unwrap();
    let actions = "  actions:\n  - {name: x, hook: job, mode: core, steps: [{wait: {seconds: 1}}]}\n";
    let http = pinned(elsewhere("{location: 'https://charts.example.com', chart: web, version: 1.2.3}", actions));
    let oci = pinned(elsewhere("{location: 'oci://registry.example.com/charts/web', version: 1.2.3}", actions));
    golden("driver_config_map", &[objects::driver_config_map(&http)]);
    golden("chart_source_http", &objects::chart_source(&http, &environment, &repository()));
    golden("chart_source_oci", &objects::chart_source(&oci, &environment, &repository()));
    golden("chart_source_own", &objects::chart_source(&pinned(driver("web-application")), &environment, &repository()));
}

#[test]
fn objects_of_a_release() {
    let environment = "environmentx".parse().unwrap();
    for (name, spec) in [("web-application", web()), ("postgresql", postgresql())] {
        let driver = pinned(driver(name));
        let values =
            objects::helm_values(&spec, &driver, &|reference| format!("<{} of {}>", reference.key, reference.name))
                .unwrap();
        let secret = objects::values_secret(&spec, &environment, &values).unwrap();
        let release = objects::helm_release(&spec, &environment, &driver, &secret, ReleaseSettings::default(), &none());
        golden(&format!("release_{name}"), &[secret, release]);
    }
    let oci = pinned(elsewhere("{location: 'oci://registry.example.com/charts/web', version: 1.2.3}", ""));
    let spec = spec_of(&oci, "1", json!({}), BTreeMap::new());
    let secret = objects::values_secret(&spec, &environment, &json!({ "kept": null })).unwrap();
    let settings = ReleaseSettings::default();
    golden("release_oci", &[objects::helm_release(&spec, &environment, &oci, &secret, settings, &none())]);
}

fn none() -> BTreeSet<String> {
    BTreeSet::new()
}

/// Scheduling, every override, replicas and a stop, as they reach a HelmRelease.
fn overridden() -> StyrminDeploymentSpec {
    let mut spec = web();
    spec.context["instance"]["config"]["scheduling"] = json!({
        "node_selector": { "pool": "a" }, "tolerations": [{ "key": "k", "operator": "Exists" }], "priority_class_name": "high",
    });
    spec.context["instance"]["config"]["ingress_class"] = "nginx".into();
    spec.context["components"]["web"] = json!({
        "image": "registry.example.com/web:2", "command": ["serve"], "args": ["--fast"], "replicas": 3,
        "resources": { "limits": { "memory": "1Gi" } }, "env_vars": { "A": "0999991", "GONE": null },
    });
    spec
}

#[test]
fn what_is_changed_in_whatever_a_chart_renders() {
    let driver = pinned(driver("web-application"));
    let all = |spec: &StyrminDeploymentSpec, stopped: &BTreeSet<String>| json!({ "postRenderers": post_render::post_renderers(spec, &driver, stopped) });
    let stopped: BTreeSet<String> = ["web".to_owned()].into();
    golden("post_renderers", &[all(&overridden(), &none())]);
    golden("post_renderers_stopped_component", &[all(&web(), &stopped)]);
    golden(
        "post_renderers_stopped",
        &[all(&StyrminDeploymentSpec { lifecycle: Lifecycle::Stopped, ..web() }, &none())],
    );
}

#[test]
fn the_class_of_an_ingress_follows_the_three_rules() {
    let driver = pinned(driver("web-application"));
    let patch = |config: Value| -> Option<Value> {
        let mut spec = web();
        for (key, value) in config.as_object().unwrap() {
            spec.context["instance"]["config"][key] = value.clone();
        }
        let all = post_render::post_renderers(&spec, &driver, &none());
        let patches = all.pointer("/0/kustomize/patches").and_then(Value::as_array).cloned().unwrap_or_default();
        let found = patches.into_iter().find(|patch| patch["target"]["kind"] == "Ingress")?;
        Some(yaml::from_str(found["patch"].as_str().unwrap()).unwrap())
    };
    let set = |patch: &Value| {
        let annotation = &patch["metadata"]["annotations"]["kubernetes.io/ingress.class"];
        (patch["spec"]["ingressClassName"].clone(), annotation.clone())
    };
    // Also an empty object turns the dedicated controller on, whatever the class is.
    let dedicated = patch(json!({ "dedicated_ingress": {}, "ingress_class": "nginx" })).unwrap();
    assert_eq!(set(&dedicated), (Value::Null, json!("traefik")));
    assert!(dedicated["spec"].as_object().unwrap().contains_key("ingressClassName"), "null removes it");
    let shared = patch(json!({ "ingress_class": "nginx" })).unwrap();
    assert_eq!(set(&shared), (json!("nginx"), json!("nginx")));
    for empty in [json!({ "ingress_class": "" }), json!({ "ingress_class": null })] {
        assert_eq!(patch(empty), None, "the chart's class stays");
    }
}

#[test]
fn a_held_release_is_what_it_was_but_for_stopped_components() {
    let environment = "environmentx".parse().unwrap();
    let driver = pinned(driver("web-application"));
    let values = objects::values_secret(&web(), &environment, &json!({})).unwrap();
    let release = |stopped: &BTreeSet<String>| {
        objects::helm_release(&web(), &environment, &driver, &values, ReleaseSettings::default(), stopped)
    };
    // What the API server and others add is not ours to write.
    let mut found = release(&none());
    found["metadata"]["resourceVersion"] = "7".into();
    found["metadata"]["labels"]["theirs"] = "x".into();
    found["spec"]["test"] = json!({ "enable": false });
    found["status"] = json!({ "conditions": [] });
    for stopped in [none(), ["web".to_owned()].into()] {
        // Also from one in which it was stopped.
        let again = objects::held_release(&release(&["web".to_owned()].into()), &driver, &stopped);
        assert_eq!(again, release(&stopped));
        assert_eq!(objects::held_release(&found, &driver, &stopped), release(&stopped));
    }
}

#[test]
fn an_override_whose_container_is_not_there_has_a_name_and_a_remedy() {
    let driver = pinned(driver("web-application"));
    let flux = "Helm upgrade failed: error while running post render: testing path /spec/template/spec/containers/0/name failed: test failed";
    let message = post_render::not_found(flux, &overridden(), &driver).unwrap();
    assert!(message.starts_with("COMPONENT_CONTAINER_NOT_FOUND: "), "{message}");
    assert!(
        message.contains("container \"web\" of component \"web\"") && message.contains("remove the override"),
        "{message}"
    );
    assert_eq!(post_render::not_found("Helm upgrade failed: timed out", &overridden(), &driver), None);
    // Nothing is overridden: it is somebody else's test.
    let mut plain = web();
    plain.context["components"]["web"] = json!({});
    assert_eq!(post_render::not_found(flux, &plain, &driver), None);
}

/// A driver with two components behind one Service, an internal one, and one that serves nothing.
fn several() -> Driver {
    let text = "apiVersion: styrmin.io/v1\nkind: ApplicationDriver\nmetadata: {name: several}\nspec:
  version: 1.0.0
  supported_versions: '*'
  helm: {main: {location: 'oci://registry.example.com/charts/several', version: 1.0.0}}
  components:
    api: {identifier: {label: {app: several, part: api}}, containers: [api]}
    worker: {identifier: {label: {app: several, part: worker}}, containers: [worker]}
    cache: {identifier: {label: {app: several, part: cache}}, containers: [cache]}
  services:
  - {name: api, kind: http, scope: external, port: 80, component: api}
  - {name: metrics, kind: http, scope: internal, port: 9090, component: api}
";
    pinned(Driver::from_files(BTreeMap::from([("driver.styrmin.yml".to_owned(), text.to_owned())])).unwrap())
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn network_of_a_deployment() {
    let environment: EnvironmentId = "environmentx".parse().unwrap();
    let driver = several();
    let spec = spec_of(&driver, "1", json!({}), BTreeMap::new());
    let file = &driver.file.spec;
    let before = network::declared(file);
    assert_eq!(before.iter().map(|one| one.target_port.as_str()).collect::<Vec<_>>(), ["80", "9090"]);
    // The chart's Service has another name, serves the port by a name, and chooses two components.
    let chart = [
        json!({ "metadata": { "name": "release-api" }, "spec": { "selector": { "app": "several", "tier": "front" },
            "ports": [{ "port": 80, "targetPort": "http" }] } }),
        json!({ "metadata": { "name": "metrics" }, "spec": { "selector": { "part": "api" }, "ports": [{ "port": 9090, "targetPort": 9191 }] } }),
        json!({ "metadata": { "name": "headless" }, "spec": { "ports": [{ "port": 80, "targetPort": 1 }] } }),
        json!({ "metadata": { "name": "other" }, "spec": { "selector": { "part": "cache" }, "ports": [{ "port": 80, "targetPort": 2 }] } }),
    ];
    let pods = [
        labels(&[("app", "several"), ("part", "api"), ("tier", "front")]),
        labels(&[("app", "several"), ("part", "worker"), ("tier", "front")]),
        labels(&[("app", "several"), ("part", "cache")]),
    ];
    let endpoints = network::endpoints(file, &chart, &pods);
    assert_eq!(
        (endpoints[0].target_port.as_str(), endpoints[0].components.as_slice()),
        ("http", &["api".to_owned(), "worker".to_owned()][..])
    );
    assert_eq!((endpoints[1].target_port.as_str(), endpoints[1].from_chart), ("9191", true));
    golden("network_policies", &network::policies(&spec, &environment, file, &endpoints));
    golden("services", &network::services(&spec, &environment, file, &endpoints));
    let holder = "abcdefghijkl".parse().unwrap();
    golden("service_alias", &[network::alias(&spec.deployment_id, "api", &holder, &environment)]);
}

#[test]
fn what_the_api_server_adds_is_no_difference_and_what_somebody_changes_is() {
    let environment: EnvironmentId = "environmentx".parse().unwrap();
    let driver = several();
    let spec = spec_of(&driver, "1", json!({}), BTreeMap::new());
    let endpoints = network::declared(&driver.file.spec);
    let service = network::services(&spec, &environment, &driver.file.spec, &endpoints).remove(0);
    let mut found = service.clone();
    // As an item of a list.
    found.as_object_mut().unwrap().remove("kind");
    found["metadata"]["uid"] = "u".into();
    found["metadata"]["labels"]["theirs"] = "x".into();
    found["spec"]["clusterIP"] = "10.0.0.1".into();
    found["spec"]["ports"][0]["nodePort"] = 0.into();
    assert_eq!(network::shape("Service", &service), network::shape("Service", &found));
    for (pointer, value) in [
        ("/metadata/labels/styrmin.io~1deployment-id", json!("another")),
        ("/spec/ports/0/targetPort", json!(81)),
        ("/spec/selector", json!({ "app": "another" })),
        ("/spec/type", json!("NodePort")),
    ] {
        let mut changed = found.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        assert_ne!(network::shape("Service", &service), network::shape("Service", &changed), "{pointer}");
    }
}

#[test]
fn a_job_of_an_action_borrows_how_the_component_runs() {
    let environment: EnvironmentId = "environmentx".parse().unwrap();
    let actions = "  actions:\n  - {name: dump, hook: upgrade, mode: pre, steps: [{run_job: {component: web, command: [dump], args: [--all], timeout_seconds: 60}}]}\n";
    let driver = pinned(elsewhere("{location: 'oci://registry.example.com/c', version: 1.0.0}", actions));
    let spec = spec_of(&driver, "1", json!({}), BTreeMap::new());
    let hook = |base: Option<&str>, run: Option<&str>| {
        let kind = StepKind::Hook {
            action: "dump".into(),
            hook: Hook::Upgrade,
            mode: Mode::Pre,
            index: 0,
            run: run.map(str::to_owned),
        };
        hooks::key(base, &driver.digest, &kind).unwrap()
    };
    let kind = StepKind::Hook { action: "dump".into(), hook: Hook::Upgrade, mode: Mode::Pre, index: 0, run: None };
    let (action, step) = hooks::step(&driver.file.spec, &kind).unwrap();
    let Step::RunJob(run) = step else { panic!() };
    let key = hook(Some("r1"), None);
    assert_eq!(key, hook(Some("r1"), None));
    for other in [hook(Some("r2"), None), hook(None, None), hook(Some("r1"), Some("run"))] {
        assert_ne!(key, other);
    }
    let template = json!({ "metadata": { "labels": { "app": "web" } }, "spec": {
        "serviceAccountName": "web", "terminationGracePeriodSeconds": 3600, "restartPolicy": "Always",
        "volumes": [{ "name": "data", "persistentVolumeClaim": { "claimName": "data" } }],
        "securityContext": { "runAsNonRoot": true },
        "containers": [{ "name": "side", "image": "side" }, {
            "name": "web", "image": "web:1", "command": ["serve"], "ports": [{ "containerPort": 80 }],
            "livenessProbe": { "httpGet": { "port": 80 } }, "env": [{ "name": "A", "value": "b" }],
            "volumeMounts": [{ "name": "data", "mountPath": "/data" }],
        }],
    } });
    let job = hooks::job(&spec, &environment, &driver, action, run, ("0123456789", 2), Some(&template)).unwrap();
    golden("hook_job", &[job]);
    // Before the chart is installed there is nothing to borrow.
    let why = hooks::job(&spec, &environment, &driver, action, run, ("0123456789", 1), None).unwrap_err();
    assert!(why.contains("dump") && why.contains("run_job.image"), "{why}");
}

#[test]
fn what_is_written_is_read_back() {
    let environment = "environmentx".parse().unwrap();
    let text = yaml::to_string(&spec::object(&web(), &environment, 7)).unwrap();
    let committed = spec::read_committed(&text).unwrap();
    assert_eq!((committed.sequence, committed.instance_id), (7, web().instance_id));
    let value: Value = yaml::from_str(&text).unwrap();
    let back: StyrminDeploymentSpec = serde_json::from_value(value["spec"].clone()).unwrap();
    assert_eq!(back, web());
    assert_eq!(back.digest(), web().digest());
    assert!(spec::read_committed("kind: x\n").is_err());
}

fn steps(
    from: Option<&StyrminDeploymentSpec>,
    to: Option<&StyrminDeploymentSpec>,
    driver: &Driver,
) -> (Workflow, Vec<String>) {
    let plan = plan::plan(from, to, &driver.file.spec.actions);
    (plan.workflow, plan.steps.into_iter().map(|step| step.name).collect())
}

#[test]
fn plans_put_hooks_where_their_mode_says() {
    let driver = elsewhere(
        "{location: 'oci://r/c', version: 1.0.0}",
        "  actions:\n  - {name: seed, hook: setup, mode: core, steps: [{run_job: {component: web, command: [seed]}}]}\n  - {name: dump, hook: upgrade, mode: pre, steps: [{stop_components: [web]}, {run_job: {component: web, command: [dump]}}]}\n  - {name: warm, hook: upgrade, mode: post, steps: [{wait: {seconds: 1}}]}\n  - {name: report, hook: job, mode: core, steps: [{execute: {component: web, command: [report]}}]}\n  - {name: save, hook: before_delete, mode: pre, steps: [{wait: {seconds: 1}}]}\n",
    );
    let one = spec_of(&driver, "1", json!({}), BTreeMap::new());
    let prerequisites = "Create network policies and secrets";
    let release = "Install or upgrade the HelmRelease";
    let services = "Create services and middlewares";
    let ready = "Wait for the deployment to be ready";

    let (workflow, names) = steps(None, Some(&one), &driver);
    assert_eq!(workflow, Workflow::Create);
    assert_eq!(names, [prerequisites, release, "Run seed", services, ready]);

    let two = spec_of(&driver, "2", json!({}), BTreeMap::new());
    let (workflow, names) = steps(Some(&one), Some(&two), &driver);
    assert_eq!(workflow, Workflow::Upgrade);
    assert_eq!(names, [prerequisites, "Run dump (1 of 2)", "Run dump (2 of 2)", release, services, "Run warm", ready]);

    let mut job = one.clone();
    job.jobs.push(JobRun { id: "j1".into(), action: "report".into() });
    let (workflow, names) = steps(Some(&one), Some(&job), &driver);
    assert_eq!(workflow, Workflow::Update);
    assert_eq!(names, [prerequisites, release, "Run report", services, ready]);
    assert!(
        !steps(Some(&job), Some(&StyrminDeploymentSpec { lifecycle: Lifecycle::Stopped, ..job.clone() }), &driver)
            .1
            .contains(&"Run report".to_owned()),
        "a job runs once"
    );

    let again = StyrminDeploymentSpec { instance_id: "another".into(), ..one.clone() };
    assert_eq!(steps(Some(&one), Some(&again), &driver), (Workflow::None, Vec::new()));
    let (workflow, names) = steps(Some(&one), None, &driver);
    assert_eq!(workflow, Workflow::Delete);
    assert_eq!(names, ["Run save", "Remove the deployment's resources and namespace"]);
}

#[test]
fn two_instances_differ_value_by_value() {
    let mut new = postgresql();
    new.context["parameters"]["password"]["secretRef"]["fingerprint"] = json!("ffff");
    new.context["parameters"]["max_connections"] = json!(200);
    let changes: Vec<String> = diff::specs(Some(&postgresql()), &new).into_iter().map(|change| change.field).collect();
    assert_eq!(changes, ["context.parameters.max_connections", "context.parameters.password.secretRef.fingerprint"]);
    assert_eq!(diff::specs(Some(&new), &new), []);
    assert!(!diff::specs(None, &new).is_empty());
}
