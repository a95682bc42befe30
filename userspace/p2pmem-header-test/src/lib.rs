// SPDX-License-Identifier: MIT OR Apache-2.0

//! Compares declarations in Rust with a C header, for the tests of crates that wrap a C library.
//!
//! ```
//! use p2pmem_header_test::Program;
//!
//! let mut program = Program::new("limits.h");
//! program.same("INT_MAX", i32::MAX.into());
//! program.line("int (*a)(int) = abs;");
//! program.include("stdlib.h");
//! program.check();
//! ```

use std::path::Path;
use std::process::{Command, Output};

/// Returns whether a test runs in the project's sandbox, which has all libraries and tools, so that no test may be skipped.
pub fn in_sandbox() -> bool {
    Path::new("/etc/p2pmem-kernel").exists()
}

/// A C program that includes a header, and that a compiler accepts only if all assertions are true.
#[derive(Debug)]
pub struct Program {
    header: &'static str,
    options: Vec<String>,
    includes: String,
    lines: String,
}

impl Program {
    /// Creates a program that includes this header.
    pub fn new(header: &'static str) -> Self {
        let mut program = Self {
            header,
            options: Vec::new(),
            includes: String::new(),
            lines: String::new(),
        };
        program.include("stddef.h");
        program.include(header);
        program
    }

    /// Sets options of the compiler.
    #[must_use]
    pub fn with_options(mut self, options: Vec<String>) -> Self {
        self.options = options;
        self
    }

    /// Includes another header.
    pub fn include(&mut self, header: &str) {
        self.includes += &format!("#include <{header}>\n");
    }

    /// Adds a line of C.
    pub fn line(&mut self, line: &str) {
        self.lines += line;
        self.lines += "\n";
    }

    /// Adds the assertion that a constant expression has this value.
    pub fn same(&mut self, what: &str, value: i128) {
        self.line(&format!(
            "_Static_assert((long long)({what}) == {value}LL, \"{what} is not {value}\");"
        ));
    }

    fn compile(&self, text: &str) -> std::io::Result<Output> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("program.c");
        std::fs::write(&file, text)?;
        Command::new("cc")
            .args(["-std=gnu11", "-Werror", "-fsyntax-only"])
            .args(&self.options)
            .arg(file)
            .output()
    }

    /// Compiles the program. Outside the sandbox, does nothing if there is no compiler or no header.
    ///
    /// # Panics
    ///
    /// The compiler does not accept the program, which is the test's failure; or the sandbox has no compiler or header.
    pub fn check(&self) {
        let has_header = |out: &Output| out.status.success();
        if !self
            .compile(&format!("#include <{}>\n", self.header))
            .is_ok_and(|out| has_header(&out))
        {
            let missing = format!("there is no cc or no {}", self.header);
            assert!(!in_sandbox(), "in the sandbox this test must run, but {missing}");
            eprintln!("skipped: {missing}");
            return;
        }
        let out = self.compile(&format!("{}{}", self.includes, self.lines));
        let out = out.expect("the compiler, which runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_fails() {
        let wrong = std::panic::catch_unwind(|| {
            let mut program = Program::new("limits.h");
            program.same("CHAR_BIT", 9);
            program.check();
        });
        // Outside the sandbox, there may be no compiler.
        assert!(wrong.is_err() || !in_sandbox());
    }
}
