// SPDX-License-Identifier: MIT OR Apache-2.0

//! Runs one test in a guest. `p2pmem-guest-tests run NAME` runs a test of the module, `without-module NAME` a test of
//! the library without the module, and `list` lists the tests of the module. The harness on the host starts this
//! program.

use std::process::ExitCode;

use p2pmem_cases as cases;
use p2pmem_guest::limits::Overrun;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["list"] => {
            for case in cases::all() {
                println!("{}\t{}\t{}", case.name, case.topology, case.about);
            }
            return ExitCode::SUCCESS;
        }
        ["run", name] => cases::run(name),
        ["without-module", name] => cases::backends::run(name),
        ["part", name, ..] => cases::run_part(name, &arguments[2..]),
        _ => {
            eprintln!("usage: p2pmem-guest-tests list | run NAME | without-module NAME");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e:#}");
            if Overrun::is(&e) {
                ExitCode::from(Overrun::CODE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
