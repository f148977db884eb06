//! Drivers' definitions, read once: a ConfigMap of one never changes, and every pass needs its own and
//! those of the other deployments of the environment.

use crate::NAMESPACE;
use crate::watch::Watch;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::layout;
use styrmin_renderer::spec::DriverRef;

/// A driver, or its error, or nothing when it is not there.
pub(super) type Found = Result<Arc<Driver>, Option<String>>;

/// What was read.
#[derive(Debug, Default)]
pub(crate) struct Drivers {
    /// By ConfigMap, with the version of it that was read.
    read: Mutex<HashMap<String, (Option<String>, Found)>>,
}

impl Drivers {
    /// The definition that a spec names.
    pub(super) fn get(&self, watch: &Watch, wanted: &DriverRef) -> Found {
        let name = format!("styrmin-driver-{}", layout::driver_name(&wanted.name, &wanted.digest));
        let found = watch.drivers.get(NAMESPACE, &name).ok_or(None)?;
        let version = found.metadata.resource_version.clone();
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = read.get(&name).filter(|(known, _)| *known == version) {
            return known.clone();
        }
        let files: BTreeMap<String, String> = found.data.clone().unwrap_or_default();
        let driver = Driver::from_definition(files, &wanted.digest).map(Arc::new).map_err(|problems| {
            let problems: Vec<String> = problems.iter().map(ToString::to_string).collect();
            Some(problems.join("; "))
        });
        read.retain(|name, _| watch.drivers.contains(NAMESPACE, name));
        read.insert(name, (version, driver.clone()));
        driver
    }
}
