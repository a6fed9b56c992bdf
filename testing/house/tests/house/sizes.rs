//! Files and functions stay small.

use house::lines;

/// Lines of code of a file, comments and tests aside.
const FILE_LINES_MAX: usize = 500;
/// Lines of code of a function, signature included.
const FUNCTION_LINES_MAX: usize = 70;

#[test]
fn files_and_functions_are_small() {
    let mut large = Vec::new();
    for root in super::roots() {
        for module in root.modules.values() {
            let path = module.path.display();
            let count = lines::count(&module.file);
            if count > FILE_LINES_MAX {
                large.push(format!("{path}: {count} lines of code"));
            }
            for function in lines::functions(&module.file) {
                if function.lines > FUNCTION_LINES_MAX {
                    large.push(format!(
                        "{path}:{}: {} has {} lines",
                        function.line, function.name, function.lines
                    ));
                }
            }
        }
    }
    assert!(large.is_empty(), "{}", large.join("\n"));
}

#[test]
fn comments_docs_and_tests_do_not_count() {
    let text = "//! Docs.\n\n/// More.\nfn a() {\n    // why\n    b();\n}\n\n#[cfg(test)]\nmod tests {\n    fn c() {}\n}\n";
    let file = house::tree::parse(text).unwrap();
    assert_eq!(lines::count(&file), 3);
    assert_eq!(lines::functions(&file).iter().map(|found| found.lines).collect::<Vec<_>>(), [3]);
}
