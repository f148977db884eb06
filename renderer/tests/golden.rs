//! Golden files for every object that Styrmin renders, from the drivers of this source tree.
//! `INSTA_UPDATE=always cargo test -p styrmin-renderer` writes them; a change of them is a change
//! of what clusters get, and is read in review.

#![expect(clippy::unwrap_used, reason = "tests fail loudly")]

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use styrmin_renderer::config::Object;
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::objects::{self, ReleaseSettings, Repository};
use styrmin_renderer::plan::{self, Workflow};
use styrmin_renderer::spec::{self, DriverRef, JobRun, Lifecycle, StyrminDeploymentSpec};
use styrmin_renderer::{diff, yaml};

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
        let release = objects::helm_release(&spec, &environment, &driver, &secret, ReleaseSettings::default());
        golden(&format!("release_{name}"), &[secret, release]);
    }
    let oci = pinned(elsewhere("{location: 'oci://registry.example.com/charts/web', version: 1.2.3}", ""));
    let spec = spec_of(&oci, "1", json!({}), BTreeMap::new());
    let secret = objects::values_secret(&spec, &environment, &json!({ "kept": null })).unwrap();
    golden("release_oci", &[objects::helm_release(&spec, &environment, &oci, &secret, ReleaseSettings::default())]);
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
    let plan = plan::plan(from, to, &driver.file.spec);
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
