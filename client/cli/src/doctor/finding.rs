//! What doctor says: findings, the worst first.

use std::fmt::Write as _;

use serde::Serialize;
use statecopy_kernels::findings::{Finding, Severity};

use crate::terminal::plain;

/// What `statecopy doctor --json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Of the program.
    pub(super) version: &'static str,
    /// How many findings are problems; the exit code is 0 only without one.
    pub(super) problems: usize,
    pub(super) warnings: usize,
    /// Problems first, then warnings, notes, and what is as it should be.
    pub(super) findings: Vec<Finding>,
}

impl Report {
    /// Of findings in any order.
    pub(super) fn of(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|finding| finding.severity);
        let count = |severity| findings.iter().filter(|found| found.severity == severity).count();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            problems: count(Severity::Problem),
            warnings: count(Severity::Warning),
            findings,
        }
    }

    /// A paragraph a finding, and a line for what is as it should be.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            let label = label(finding.severity);
            let device = finding.device.as_ref().map_or(String::new(), |name| format!(" {name}"));
            let evidence = plain(&finding.evidence);
            let _written = writeln!(text, "{label:8}{}{device}: {evidence}", finding.check);
            if finding.severity == Severity::Ok {
                continue;
            }
            let remedy = match finding.remedy.as_str() {
                "" => String::new(),
                remedy => format!("Do: {remedy}"),
            };
            for part in [&finding.meaning, &remedy].into_iter().filter(|part| !part.is_empty()) {
                let _written = writeln!(text, "        {}", plain(part));
            }
            text.push('\n');
        }
        let (problems, warnings) = (self.problems, self.warnings);
        let _written = writeln!(text, "Problems: {problems}, warnings: {warnings}");
        text
    }
}

fn label(severity: Severity) -> &'static str {
    match severity {
        Severity::Problem => "PROBLEM",
        Severity::Warning => "WARNING",
        Severity::Note => "note",
        Severity::Ok => "ok",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_come_first_and_what_is_well_is_one_line() {
        let report = Report::of(vec![
            Finding::new(Severity::Ok, "page_size", "4096 bytes").means("Nothing."),
            Finding::new(Severity::Warning, "cpus", "1").means("No spinning."),
            Finding::new(Severity::Problem, "memory", "\x1b[2J").of_device(3).remedied_by("Free."),
        ]);
        let expected = "PROBLEM memory cuda:3: \\u{1b}[2J\n        Do: Free.\n\n\
                        WARNING cpus: 1\n        No spinning.\n\n\
                        ok      page_size: 4096 bytes\nProblems: 1, warnings: 1\n";
        assert_eq!(report.text(), expected);
    }
}
