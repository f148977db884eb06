//! Drivers: how one application is deployed.
//!
//! [`format`] is the shape of the files, [`check`] decides whether a folder is a good driver. The
//! format is described for people in `docs/drivers.md`.

pub mod check;
pub mod format;

pub use check::{Driver, FileProblem};
pub use format::{DriverFile, DriverSpec};

use semver::{Version, VersionReq};

/// Name of the file that makes a folder a driver.
pub const DRIVER_FILE: &str = "driver.styrmin.yml";
/// Name of the file with the chart's values.
pub const VALUES_FILE: &str = "values.styrmin.yml";

/// An application version as a semantic one: `17` is 17.0.0, `v1.20` is 1.20.0. `None` for what
/// has no number in front; such a version is supported only by `*`.
#[must_use]
pub fn application_version(text: &str) -> Option<Version> {
    let text = text.strip_prefix('v').unwrap_or(text);
    if let Ok(version) = Version::parse(text) {
        return Some(version);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (numbers, rest) = text.split_at(end);
    let mut parts = numbers.trim_end_matches('.').split('.').map(str::parse::<u64>);
    let mut next = || parts.next().unwrap_or(Ok(0)).ok();
    let (major, minor, patch) = (next()?, next()?, next()?);
    // What follows the third number is a suffix that only an exact version could name.
    let suffix = rest.starts_with(['-', '+']) || rest.is_empty();
    suffix.then(|| Version::new(major, minor, patch))
}

/// Whether a driver with these `supported` versions can deploy `version`.
#[must_use]
pub fn supports(supported: &VersionReq, version: &str) -> bool {
    *supported == VersionReq::STAR || application_version(version).is_some_and(|version| supported.matches(&version))
}

/// The version that a deployment gets: the highest `spec.version` that supports
/// `application_version`; of equal ones (build metadata aside) the one given last.
#[must_use]
pub fn select<'a>(candidates: impl IntoIterator<Item = &'a Driver>, application_version: &str) -> Option<&'a Driver> {
    candidates
        .into_iter()
        .filter(|driver| supports(&driver.supported, application_version))
        .max_by(|a, b| a.version.cmp_precedence(&b.version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn application_versions_are_read_leniently() {
        for (text, expected) in [
            ("1.6.0", Some("1.6.0")),
            ("1.20", Some("1.20.0")),
            ("17", Some("17.0.0")),
            ("v2.1", Some("2.1.0")),
            ("17-alpine", Some("17.0.0")),
            ("latest", None),
            ("", None),
        ] {
            assert_eq!(application_version(text).map(|v| v.to_string()).as_deref(), expected, "{text}");
        }
    }

    #[test]
    fn a_range_decides_what_is_supported() {
        let range = VersionReq::parse(">=0.1, <2").unwrap();
        assert!(supports(&range, "0.1") && supports(&range, "1.20"));
        assert!(!supports(&range, "2") && !supports(&range, "latest"));
        assert!(supports(&VersionReq::STAR, "latest"));
    }
}
