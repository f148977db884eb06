//! What a chart renders, on its way into the cluster through Flux: values as they are, and what Styrmin changes in
//! all of it, hooks included.

use serde_json::{Value, json};
use std::path::Path;
use styrmin_renderer::spec::{DEPLOYMENT_LABEL, ENVIRONMENT_LABEL};
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World, driver};

const CHART: [(&str, &str); 6] = [
    ("Chart.yaml", "apiVersion: v2\nname: shaped\nversion: 1.0.0\n"),
    ("values.yaml", "removed: {by: default}\nkept: 1\n"),
    (
        "templates/values.yaml",
        r#"apiVersion: v1
kind: ConfigMap
metadata: {name: seen}
data: {values: {{ .Values | toJson | quote }}}
"#,
    ),
    (
        "templates/web.yaml",
        r#"apiVersion: apps/v1
kind: Deployment
metadata: {name: web, labels: {app.kubernetes.io/component: web}}
spec:
  replicas: 1
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, app.kubernetes.io/component: web}}
    spec:
      containers:
      - {name: web, image: example.com/web:1, env: [{name: OWN, value: chart}]}
      - {name: beside, image: example.com/beside:1}
"#,
    ),
    (
        "templates/hook.yaml",
        r#"apiVersion: batch/v1
kind: Job
metadata:
  name: prepare
  annotations: {helm.sh/hook: "pre-install,pre-upgrade", helm.sh/hook-delete-policy: before-hook-creation}
spec:
  template:
    spec:
      restartPolicy: Never
      containers: [{name: prepare, image: example.com/web:1}]
"#,
    ),
    (
        "templates/ingress.yaml",
        r#"apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: web
  annotations: {kubernetes.io/ingress.class: of-the-annotation, example.com/other: stays}
spec:
  ingressClassName: of-the-field
  rules: [{host: web.example.com, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]
"#,
    ),
];

/// The web application's driver with a chart that shows what becomes of it.
fn shaped(folder: &Path) {
    driver(folder, "shaped", "web", "web", "");
    let target = folder.join("shaped");
    std::fs::remove_dir_all(target.join("chart")).unwrap();
    for (name, text) in CHART {
        let file = target.join("chart").join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    let values =
        "removed: null\nempty: {}\nversion: ${{ app.version }}\nlike: {n: 'no', '0': '0999991', deep: {gone: null}}\n";
    std::fs::write(target.join("values.styrmin.yml"), values).unwrap();
}

async fn deployed(world: &World, task: &str) {
    let task = world.until_ended(task).await;
    assert_eq!(task["state"], "SUCCEEDED", "{task:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn values_labels_scheduling_overrides_and_classes_reach_everything_that_a_chart_renders() {
    let world = World::start_with(shaped).await;
    let client = world.client();
    let config = json!({
        "ingress_class": "ours",
        "scheduling": { "tolerations": [{ "key": "gpu", "operator": "Exists" }], "priority_class_name": "system-cluster-critical" },
        "components": { "web": { "replicas": 2, "image": "example.com/web:other", "env_vars": { "OWN": null, "MORE": "1" },
            "resources": { "requests": { "cpu": "10m" } } } },
    });
    let input = json!({ "environment": world.environment, "name": "shaped", "driver": "shaped", "applicationVersion": "1.20",
        "parameters": { "image": "nginx" }, "config": config });
    let (id, task) = client.create(input).await.unwrap();
    deployed(&world, &task).await;
    let (_, name) = world.object(&id);
    let get = async |version: &str, kind: &str, object: &str| {
        let found = world.plane.get(&[version, kind, &name, object]).await;
        found.unwrap_or_else(|| panic!("no {kind} {object}"))
    };
    let values = async || -> Value {
        let seen = get("v1", "ConfigMap", "seen").await;
        serde_json::from_str(seen["data"]["values"].as_str().unwrap()).unwrap()
    };
    // A null takes the chart's default away, and everything else is what it was.
    let mut expected =
        json!({ "empty": {}, "kept": 1, "like": { "0": "0999991", "deep": {}, "n": "no" }, "version": "1.20" });
    let without_nulls = |mut value: Value| {
        value.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        value["like"]["deep"].as_object_mut().unwrap().retain(|_, value| !value.is_null());
        value
    };
    assert_eq!(without_nulls(values().await), expected);
    let [deployment, hook, ingress] = [
        get("apps/v1", "Deployment", "web").await,
        get("batch/v1", "Job", "prepare").await,
        get("networking.k8s.io/v1", "Ingress", "web").await,
    ];
    for object in [&deployment, &hook, &ingress] {
        let labels = &object["metadata"]["labels"];
        assert_eq!(labels[DEPLOYMENT_LABEL], id.as_str(), "{object:#}");
        assert_eq!(labels[ENVIRONMENT_LABEL], world.environment.as_str(), "{object:#}");
    }
    for object in [&deployment, &hook] {
        let pod = &object["spec"]["template"]["spec"];
        assert_eq!(pod["priorityClassName"], "system-cluster-critical", "{object:#}");
        assert_eq!(pod["tolerations"][0]["key"], "gpu", "{object:#}");
    }
    // The override is of the component's container and of no other, and a hook is no component.
    let containers = &deployment["spec"]["template"]["spec"]["containers"];
    assert_eq!((deployment["spec"]["replicas"].as_i64(), containers.as_array().unwrap().len()), (Some(2), 2));
    assert_eq!(
        (&containers[0]["image"], &containers[1]["image"]),
        (&json!("example.com/web:other"), &json!("example.com/beside:1"))
    );
    assert_eq!(containers[0]["env"], json!([{ "name": "MORE", "value": "1" }]));
    assert_eq!(containers[0]["resources"]["requests"]["cpu"], "10m");
    assert_eq!(hook["spec"]["template"]["spec"]["containers"][0]["image"], "example.com/web:1");
    // One class, however the chart names it: by the field, and by the annotation for controllers that read that.
    let class = |ingress: &Value| {
        let annotation = ingress["metadata"]["annotations"]["kubernetes.io/ingress.class"].clone();
        (ingress["spec"]["ingressClassName"].clone(), annotation)
    };
    assert_eq!(class(&ingress), (json!("ours"), json!("ours")));
    assert_eq!(ingress["metadata"]["annotations"]["example.com/other"], "stays");

    // The same on the second deploy; a dedicated controller reads only the annotation.
    let change = json!({ "applicationVersion": "1.21", "config": { "set": { "dedicated_ingress": {} } } });
    deployed(&world, &world.update(&id, change).await).await;
    expected["version"] = "1.21".into();
    assert_eq!(without_nulls(values().await), expected);
    assert_eq!(class(&get("networking.k8s.io/v1", "Ingress", "web").await), (Value::Null, json!("traefik")));
    let hook = get("batch/v1", "Job", "prepare").await;
    assert_eq!(hook["metadata"]["labels"][DEPLOYMENT_LABEL], id.as_str());
    assert_eq!(hook["spec"]["template"]["spec"]["priorityClassName"], "system-cluster-critical");
    // An empty class is the chart's own.
    let change = json!({ "config": { "set": { "ingress_class": "" }, "remove": ["/dedicated_ingress"] } });
    deployed(&world, &world.update(&id, change).await).await;
    let ingress = get("networking.k8s.io/v1", "Ingress", "web").await;
    assert_eq!(class(&ingress), (json!("of-the-field"), json!("of-the-annotation")));

    // What Helm owns is put back by Flux, and that is told.
    let edit = r#"{"spec":{"template":{"spec":{"priorityClassName":null}}}}"#;
    world.plane.kubectl(&["-n", &name, "patch", "deployment", "web", "--type=merge", "-p", edit]).await;
    let asked = format!("reconcile.fluxcd.io/requestedAt={}", rand::random::<u64>());
    let (namespace, _) = world.object(&id);
    world.plane.kubectl(&["-n", &namespace, "annotate", "--overwrite", "helmrelease", &name, &asked]).await;
    let key = ["apps/v1", "Deployment", name.as_str(), "web"];
    let back = |found: Option<&Value>| {
        found.is_some_and(|found| found["spec"]["template"]["spec"]["priorityClassName"] == "system-cluster-critical")
    };
    world.plane.until(&key, LIMIT, back).await;
    let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
    let told =
        |found: Option<&Value>| found.is_some_and(|found| found["status"]["driftCorrections"].as_u64() >= Some(1));
    world.plane.until(&key, LIMIT, told).await;
}
