//! The environment of a device process: its part of the compiler configuration, and the libraries that are injected into it
//! (contract: Seal).

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use statecopy_proto::{Refusal, RefusalCode};

use crate::device::Configuration;

/// Variables with these prefixes belong to the configuration.
const PREFIXES: [&str; 9] =
    ["TRITON_", "ASCEND_", "CANN_", "TORCH_NPU_", "NPU_", "LLVM_", "CUDA_", "NVRTC_", "NVIDIA_"];
/// And so do these.
const NAMES: [&str; 3] = ["LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"];
/// Variables that name libraries to inject. `LD_PRELOAD` takes several, divided by spaces or colons; so does `LD_AUDIT`.
const INJECTORS: [&str; 4] =
    ["LD_PRELOAD", "LD_AUDIT", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH"];

/// What this process was given in its environment, as far as it matters here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Environment {
    variables: Vec<(String, OsString)>,
}

impl Environment {
    /// Reads it. The only place that does: everything else sees this snapshot.
    #[expect(clippy::disallowed_methods, reason = "this is the door of the environment")]
    pub(crate) fn read() -> Self {
        Self::of(env::vars_os())
    }

    fn of(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let mut variables: Vec<(String, OsString)> = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
            .filter(|(name, _)| configures(name) || INJECTORS.contains(&name.as_str()))
            .collect();
        variables.sort();
        Self { variables }
    }

    /// The configuration: what the device says of its compiler, versions, kernel, and the variables that the contract names.
    pub(crate) fn configuration<const N: usize>(
        &self,
        device: [(&str, String); N],
    ) -> Configuration {
        let uname = rustix::system::uname();
        let process = [
            ("statecopy", env!("CARGO_PKG_VERSION").to_owned()),
            ("rustc", env!("STATECOPY_RUSTC").to_owned()),
            ("kernel", uname.release().to_string_lossy().into_owned()),
        ];
        let mut entries: Vec<(String, String)> = device
            .into_iter()
            .chain(process)
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let variables = self.variables.iter().filter(|(name, _)| configures(name));
        // Escaped, so that two values that are not UTF-8 stay two.
        entries.extend(variables.map(|(name, value)| {
            (format!("env {name}"), value.as_encoded_bytes().escape_ascii().to_string())
        }));
        entries.sort();
        Configuration { entries }
    }

    /// Looks for a library that the environment injected and that is mapped now.
    ///
    /// `allowed` are file names of libraries, as the variable names them, that may be there: a memory allocator's, say.
    pub(crate) fn check_injections(&self, allowed: &[String]) -> Result<(), Refusal> {
        match self.injection(&maps()?, allowed) {
            Some((variable, library)) => Err(Refusal::new(
                RefusalCode::HookPresent,
                format!("The library {library} was injected by {variable}"),
            )
            .about(library)),
            None => Ok(()),
        }
    }

    /// The first injected library among the mapped ones that is not allowed, and the variable that names it.
    fn injection(&self, maps: &str, allowed: &[String]) -> Option<(&str, String)> {
        let mapped: Vec<&str> = maps.lines().filter_map(mapped_path).collect();
        self.variables
            .iter()
            .filter(|(name, _)| INJECTORS.contains(&name.as_str()))
            .flat_map(|(name, value)| {
                let value = value.to_string_lossy();
                let entries: Vec<String> = value
                    .split([' ', ':'])
                    .filter(|it| !it.is_empty())
                    .map(str::to_owned)
                    .collect();
                entries.into_iter().map(move |entry| (name.as_str(), entry))
            })
            .filter(|(_, entry)| {
                !file_name(entry).is_some_and(|it| allowed.iter().any(|a| a == it))
            })
            .find(|(_, entry)| mapped.iter().any(|path| is_the_file(path, entry)))
    }
}

/// Where the library of that name (`libcuda`) is mapped from; `None` when it is not.
pub(crate) fn mapped_library(name: &str) -> Option<String> {
    let maps = maps().ok()?;
    maps.lines()
        .filter_map(mapped_path)
        .find(|path| library_name(path) == Some(name))
        .map(str::to_owned)
}

/// Refuses while a library of that name, which watches launches, is mapped, whoever loaded it.
pub(crate) fn check_absent(name: &str) -> Result<(), Refusal> {
    maps()?;
    match mapped_library(name) {
        Some(path) => {
            let sentence = format!("The library {path} watches the launches of this process");
            Err(Refusal::new(RefusalCode::HookPresent, sentence).about(path))
        }
        None => Ok(()),
    }
}

/// What is mapped into this process, one mapping a line.
fn maps() -> Result<String, Refusal> {
    let maps = fs::read("/proc/self/maps").map_err(|error| {
        let sentence = format!("The libraries of this process cannot be listed: {error}");
        Refusal::new(RefusalCode::HookPresent, sentence)
    })?;
    Ok(String::from_utf8_lossy(&maps).into_owned())
}

/// Whether a variable belongs to the configuration.
fn configures(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name)
}

/// The path in a line of `/proc/self/maps`: what follows the fifth field.
fn mapped_path(line: &str) -> Option<&str> {
    let path = line.find('/').map(|at| &line[at..])?;
    Some(path.strip_suffix(" (deleted)").unwrap_or(path))
}

/// Whether the mapped path is the file that a variable names: by its path, or by its name as the loader searches for it.
/// The map shows where symbolic links lead (`libhook.so.1.2` for `libhook.so.1`), so versions are left out of names.
fn is_the_file(mapped: &str, entry: &str) -> bool {
    let resolved = fs::canonicalize(entry).ok();
    resolved.is_some_and(|path| path == Path::new(mapped))
        || (library_name(mapped).is_some() && library_name(mapped) == library_name(entry))
}

fn library_name(path: &str) -> Option<&str> {
    file_name(path)?.split(".so").next()
}

fn file_name(path: &str) -> Option<&str> {
    Path::new(path).file_name()?.to_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Environment {
        Environment::of(variables.iter().map(|(name, value)| (name.into(), value.into())))
    }

    const MAPS: &str = "\
7f0000000000-7f0000001000 r-xp 00000000 08:01 12 /usr/lib/libc.so.6
7f0000002000-7f0000003000 rw-p 00000000 00:00 0 
7f0000004000-7f0000005000 r-xp 00000000 08:01 13 /opt/a tool/libhook.so.1
7f0000006000-7f0000007000 r-xp 00000000 08:01 14 /opt/libold.so (deleted)
";

    #[test]
    fn the_configuration_holds_the_variables_that_the_contract_names() {
        let names = [
            "TRITON_A",
            "ASCEND_A",
            "CANN_A",
            "TORCH_NPU_A",
            "NPU_A",
            "LLVM_A",
            "CUDA_A",
            "NVRTC_A",
            "NVIDIA_A",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "PYTHONPATH",
        ];
        let mut given: Vec<(&str, &str)> = names.iter().map(|name| (*name, "1")).collect();
        given.extend([
            ("HOME", "/root"),
            ("LD_AUDIT", "x"),
            ("MY_CUDA_A", "1"),
            ("PYTHONPATHS", "1"),
        ]);
        let configuration = environment(&given).configuration([]);
        let mut found: Vec<&str> = configuration
            .entries
            .iter()
            .filter_map(|(name, _)| name.strip_prefix("env "))
            .collect();
        let mut names = names.to_vec();
        found.sort_unstable();
        names.sort_unstable();
        assert_eq!(found, names);
    }

    #[test]
    fn a_changed_added_or_removed_variable_is_drift_and_is_named() {
        let by = |given: &[(&str, &str)], stores: &str| {
            environment(given).configuration([("stores", stores.to_owned())])
        };
        let configuration = |given: &[(&str, &str)]| by(given, "ordinary");
        let before = configuration(&[("CUDA_A", "1"), ("LLVM_B", "2"), ("HOME", "/a")]);
        assert!(before.drift(&before).is_empty());
        assert!(before.drift(&configuration(&[("LLVM_B", "2"), ("CUDA_A", "1")])).is_empty());
        let after = configuration(&[("CUDA_A", "3"), ("NPU_C", "")]);
        assert_eq!(before.drift(&after), ["env CUDA_A", "env LLVM_B", "env NPU_C"]);
        assert_eq!(configuration(&[]).drift(&by(&[], "avx2 streaming")), ["stores"]);
    }

    #[test]
    fn a_mapped_library_that_a_variable_names_is_a_hook() {
        let found = |given: &[(&str, &str)], allowed: &[&str]| {
            let allowed: Vec<String> = allowed.iter().map(|name| (*name).to_owned()).collect();
            environment(given)
                .injection(MAPS, &allowed)
                .map(|(name, entry)| format!("{name} {entry}"))
        };
        let hook = "libhook.so.1";
        // By its soname, although the file that is mapped has a longer name.
        assert!(found(&[("LD_PRELOAD", "libold.so.3")], &[]).is_some());
        assert!(found(&[("LD_PRELOAD", "/opt/libolder.so")], &[]).is_none());
        for name in INJECTORS {
            assert_eq!(found(&[(name, hook)], &[]), Some(format!("{name} {hook}")));
        }
        assert_eq!(found(&[], &[]), None);
        assert_eq!(found(&[("LD_PRELOAD", "/opt/libabsent.so")], &[]), None);
        assert_eq!(found(&[("PATH", "/usr/lib/libc.so.6")], &[]), None);
        assert_eq!(found(&[("LD_PRELOAD", hook)], &[hook]), None);
        // One allowed library does not excuse another, however they are divided.
        for divider in [" ", ":"] {
            let two = format!("{hook}{divider}/opt/libold.so");
            let named = Some("LD_PRELOAD /opt/libold.so".to_owned());
            assert_eq!(found(&[("LD_PRELOAD", &two)], &[hook]), named);
        }
    }

    #[test]
    fn a_library_that_watches_launches_is_a_hook_whoever_loaded_it() {
        let mapped = mapped_library("libc").expect("the C library is mapped");
        assert!(mapped.contains("/libc.so"), "{mapped}");
        let refusal = check_absent("libc").unwrap_err();
        assert_eq!(
            (refusal.code(), refusal.subject()),
            (RefusalCode::HookPresent, mapped.as_str())
        );
        assert_eq!(check_absent("libcupti"), Ok(()));
    }

    #[test]
    fn a_library_behind_a_symbolic_link_is_found_by_the_file_it_leads_to() {
        let real = env::current_exe().unwrap().canonicalize().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("liblink.so");
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let maps = format!("7f00-7f01 r-xp 00000000 08:01 13 {}\n", real.display());
        let given = environment(&[("LD_PRELOAD", link.to_str().unwrap())]);
        assert!(given.injection(&maps, &[]).is_some());
    }
}
